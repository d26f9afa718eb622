"""The built-in models: OpenVLA's architecture at about 4 or 6 M parameters, with its own small tokenizer.

Most parameters sit in the vision towers. The tiny model sees 16 tokens an image, so that a forward pass stays near
200 MFLOP; the small one is for simulators, whose objects need images of twice the side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vlarl.policies.openvla.config import NATIVE_KEY, DecoderName, OpenVLAConfig, parse_config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.vision import LayerScale, VisionTower
from vlarl.policies.tiny_inputs import (
    ACTION_DIM,
    IMAGE_SIZE,
    PROPRIO_DIM,
    SPECIAL_TOKENS,
    TEXT_VOCAB_SIZE,
    TOKENIZER_CONFIG,
    build_tiny_tokenizer,
)

STATISTICS_KEY = "tabletop"
NUM_ACTION_BINS = 256  # their ids follow those of text; then come the padding rows
PAD_TO_MULTIPLE_OF = 64


@dataclass(frozen=True)
class Widths:
    """How wide and deep the two vision towers and the language model are; all heads are 32 wide."""

    tower: int
    tower_layers: int
    hidden: int
    intermediate: int
    layers: int


TINY = Widths(tower=128, tower_layers=5, hidden=160, intermediate=352, layers=3)
SMALL = Widths(tower=160, tower_layers=5, hidden=192, intermediate=448, layers=4)
HEAD_WIDTH = 32


def tiny_config(
    decoder: DecoderName = "parallel",
    chunk_length: int | None = None,
    *,
    num_images: int = 1,
    use_proprio: bool = True,
    learned_slots: bool = True,
    image_size: int = IMAGE_SIZE,
    action_dim: int = ACTION_DIM,
    proprio_dim: int = PROPRIO_DIM,
    proprio_low: Sequence[float] = (-1.0,) * PROPRIO_DIM,
    proprio_high: Sequence[float] = (1.0,) * PROPRIO_DIM,
    norm_stats: Mapping[str, Mapping[str, Any]] | None = None,
    widths: Widths = TINY,
) -> OpenVLAConfig:
    """The configuration of the built-in model; proprio bounds are those of its robot.

    `norm_stats` are more statistics by key, for robots and suites other than the tabletop.
    """
    vocab_size = TEXT_VOCAB_SIZE + NUM_ACTION_BINS + PAD_TO_MULTIPLE_OF
    tower = {
        "embed_dim": widths.tower,
        "depth": widths.tower_layers,
        "num_heads": widths.tower // HEAD_WIDTH,
    }
    raw: dict[str, Any] = {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "arch_specifier": "no-align+fused-gelu-mlp",
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "use_fused_vision_backbone": True,
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "timm_model_kwargs": [
            tower | {"reg_tokens": 1},
            tower | {"mlp_ratio": 4.0},
        ],
        "image_sizes": [image_size, image_size],
        "image_resize_strategy": "resize-naive",
        "n_action_bins": NUM_ACTION_BINS,
        "pad_to_multiple_of": PAD_TO_MULTIPLE_OF,
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
        "text_config": {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": widths.hidden,
            "intermediate_size": widths.intermediate,
            "num_hidden_layers": widths.layers,
            "num_attention_heads": widths.hidden // HEAD_WIDTH,
            "num_key_value_heads": widths.hidden // HEAD_WIDTH,
            "max_position_embeddings": 512,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
            "tie_word_embeddings": False,
        },
        "norm_stats": {STATISTICS_KEY: unit_statistics(proprio_low, proprio_high)}
        if norm_stats is None
        else norm_stats,
        NATIVE_KEY: {
            "decoder": decoder,
            "chunk_length": chunk_length or (4 if decoder == "parallel" else 1),
            "num_images": num_images,
            "use_proprio": use_proprio,
            "action_dim": action_dim,
            "proprio_dim": proprio_dim,
            "prompt_suffix_id": None,
            "learned_slots": learned_slots,
        },
    }
    return parse_config(raw)


def init_tiny(decoder: DecoderName = "parallel", seed: int = 0, **sizes: Any) -> OpenVLAPolicy:
    """The built-in model with fresh weights; `sizes` are the other arguments of `tiny_config`."""
    policy = OpenVLAPolicy(tiny_config(decoder, **sizes), build_tiny_tokenizer())
    policy.assets["tokenizer_config.json"] = json.dumps(TOKENIZER_CONFIG, indent=2).encode()
    initialize(policy, torch.Generator().manual_seed(seed))
    return policy


@torch.no_grad()
def initialize(policy: OpenVLAPolicy, generator: torch.Generator) -> None:
    """Weights that train from scratch: unit-variance layers, small residual branches, near-uniform first actions."""
    for name, module in policy.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            _initialize_linear(name, module, generator)
        elif isinstance(module, nn.Embedding):
            _fill_normal(module.weight, 0.3, generator)
        elif isinstance(module, LayerScale):
            module.scale_factor.fill_(1.0)
        elif isinstance(module, VisionTower):
            _fill_normal(module.pos_embed, 0.9, generator)
            for parameter in (module.cls_token, module.reg_token):
                if parameter is not None:
                    _fill_normal(parameter, 0.3, generator)


def _initialize_linear(name: str, module: nn.Linear | nn.Conv2d, generator: torch.Generator) -> None:
    branch_end = name.endswith(("attn.proj", "mlp.fc2", "o_proj", "down_proj"))
    std = 0.02 if name.endswith("lm_head") else (0.3 if branch_end else 1.0) * module.weight[0].numel() ** -0.5
    _fill_normal(module.weight, std, generator)
    if isinstance(module, nn.Conv2d):
        # The mean colour is nearly equal in all patches and hides how they differ: with it a learning rate of 1e-3
        # never learns to see, without it 400 updates locate a cube to the pixel.
        module.weight.sub_(0.9 * module.weight.mean(dim=(2, 3), keepdim=True))
    if module.bias is not None:
        module.bias.zero_()


def _fill_normal(parameter: torch.Tensor, std: float, generator: torch.Generator) -> None:
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def unit_statistics(low: Sequence[float], high: Sequence[float]) -> dict[str, Any]:
    """Statistics of a robot whose actions are already normalised, including the gripper; proprio has these bounds."""
    return {
        "action": {
            "q01": [-1.0] * ACTION_DIM,
            "q99": [1.0] * ACTION_DIM,
            "mask": [True] * (ACTION_DIM - 1) + [False],
        },
        "proprio": {"q01": list(low), "q99": list(high), "mask": [True] * len(low)},
    }
