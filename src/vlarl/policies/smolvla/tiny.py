"""The built-in flow policy: SmolVLA's architecture at about 3 M parameters, for 56 px views, with fresh weights.

The original scales what its language model reads by the square root of its width. Fresh weights of usual sizes would
leave the layers without influence on such states, so here all that enters the language model and all that its layers
add have the same std, `STREAM`; a tenfold std of either would make one of them learn ten times slower.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from vlarl.policies.flow import Denoising
from vlarl.policies.smolvla.config import ACTION, IMAGES, STATE, SmolVLAConfig, parse_config
from vlarl.policies.smolvla.conventions import Conventions
from vlarl.policies.smolvla.layers import RMSNorm
from vlarl.policies.smolvla.model import SmolVLAModel
from vlarl.policies.smolvla.pipelines import standard_pipelines, written
from vlarl.policies.smolvla.policy import SmolVLAPolicy
from vlarl.policies.smolvla.processor import Processor
from vlarl.policies.smolvla.statistics import Scaling, Scalings
from vlarl.policies.smolvla.vision import Embeddings
from vlarl.policies.tiny_inputs import (
    ACTION_DIM,
    IMAGE_SIZE,
    PROPRIO_DIM,
    SPECIAL_TOKENS,
    TEXT_VOCAB_SIZE,
    TOKENIZER_CONFIG,
    build_tiny_tokenizer,
)

IMAGE_TOKENS = ("<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>")
TOKENS = SPECIAL_TOKENS + IMAGE_TOKENS
NAMED_TOKENS = {  # attributes of the tokenizer that lerobot reads
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "image_token": "<image>",
    "end_of_utterance_token": "<end_of_utterance>",
}
IMAGE_PROCESSOR = {"image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor"}
BACKBONE = "vlm"  # the folder of the backbone inside the checkpoint
VIEWS = ("image", "wrist_image", "image2", "image3")
CHUNK, NUM_STEPS = 4, 5
PATCH, MERGED = 14, 1  # pixels of a side, and patches of a side of those that become one token
HIDDEN, LAYERS, HEADS = 128, 4, 4
PADDED = 8  # the least dimensions that states and actions are padded to
STREAM = 3.0  # std of the language model's states
NORM_MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}


def backbone_config(image_size: int) -> dict[str, Any]:
    """config.json of the backbone."""
    return {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": TOKENS.index("<image>"),
        "pad_token_id": TOKENS.index("<pad>"),
        "scale_factor": MERGED,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama",
            "vocab_size": TEXT_VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": 3 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HIDDEN // HEADS,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512,
            "pad_token_id": TOKENS.index("<pad>"),
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_channels": 3,
            "image_size": image_size,
            "patch_size": PATCH,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
    }


def policy_config(
    chunk_length: int, num_images: int, image_size: int, action_dim: int, proprio_dim: int
) -> dict[str, Any]:
    """config.json as lerobot writes it."""
    view = {"type": "VISUAL", "shape": [3, image_size, image_size]}
    return {
        "type": "smolvla",
        "n_obs_steps": 1,
        "input_features": {
            **{f"{IMAGES}.{name}": view for name in VIEWS[:num_images]},
            STATE: {"type": "STATE", "shape": [proprio_dim]},
        },
        "output_features": {ACTION: {"type": "ACTION", "shape": [action_dim]}},
        "device": "cpu",
        "use_amp": False,
        "chunk_size": chunk_length,
        "n_action_steps": chunk_length,
        "normalization_mapping": NORM_MODES,
        "max_state_dim": max(PADDED, proprio_dim),
        "max_action_dim": max(PADDED, action_dim),
        "resize_imgs_with_padding": [image_size, image_size],
        "empty_cameras": 0,
        "adapt_to_pi_aloha": False,
        "use_delta_joint_actions_aloha": False,
        "tokenizer_max_length": 48,
        "num_steps": NUM_STEPS,
        "use_cache": True,
        "freeze_vision_encoder": True,
        "train_expert_only": True,
        "train_state_proj": True,
        "vlm_model_name": BACKBONE,
        "load_vlm_weights": False,
        "add_image_special_tokens": False,
        "attention_mode": "cross_attn",
        "prefix_length": -1,
        "pad_language_to": "longest",
        "num_expert_layers": -1,
        "num_vlm_layers": LAYERS,
        "self_attn_every_n_layers": 2,
        "expert_width_multiplier": 1.0,
        "min_period": 4e-3,
        "max_period": 4.0,
    }


def init_tiny_smolvla(
    seed: int = 0,
    *,
    chunk_length: int | None = None,
    num_images: int = 1,
    image_size: int = IMAGE_SIZE,
    action_dim: int = ACTION_DIM,
    proprio_dim: int = PROPRIO_DIM,
) -> SmolVLAPolicy:
    """The built-in model with fresh weights and without statistics, which come with the demonstrations."""
    if num_images > len(VIEWS):
        raise ValueError(f"{num_images} views: at most {len(VIEWS)} are supported")
    raw = policy_config(chunk_length or CHUNK, num_images, image_size, action_dim, proprio_dim)
    backbone = backbone_config(image_size)
    config = parse_config(raw, backbone)
    tokenizer = build_tiny_tokenizer(TOKENS, phrases=())
    empty = Scaling("MEAN_STD")
    processor = Processor(config, tokenizer, TOKENS.index("<pad>"), Scalings(empty, empty), num_images)
    policy = SmolVLAPolicy(config, processor, Conventions(Denoising(config.num_steps), config.n_action_steps))
    policy.files = standard_pipelines(raw) | {
        f"{BACKBONE}/config.json": written(backbone),
        f"{BACKBONE}/tokenizer.json": tokenizer.to_str().encode(),
        f"{BACKBONE}/tokenizer_config.json": written(
            TOKENIZER_CONFIG | {"additional_special_tokens": list(IMAGE_TOKENS), "extra_special_tokens": NAMED_TOKENS}
        ),
        f"{BACKBONE}/preprocessor_config.json": written(IMAGE_PROCESSOR),
    }
    initialize(policy.model, torch.Generator().manual_seed(seed))
    return policy


def unit_scalings(config: SmolVLAConfig) -> Scalings:
    """Statistics that leave states and actions as they are."""
    sizes = (config.state_dim, config.action_dim)
    state, action = (Scaling("MEAN_STD", {"mean": torch.zeros(n), "std": torch.ones(n)}) for n in sizes)
    return Scalings(state, action)


@torch.no_grad()
def initialize(model: SmolVLAModel, generator: torch.Generator) -> None:
    """Weights that train from scratch: layers of unit variance, small residual branches, small first velocities."""
    config = model.config
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            _fill(module.weight, _std(name, module, config), generator)
            if module.bias is not None:
                module.bias.zero_()
            if isinstance(module, nn.Conv2d):  # the mean colour is nearly equal in all patches: it hides differences
                module.weight.sub_(0.9 * module.weight.mean(dim=(2, 3), keepdim=True))
        elif isinstance(module, Embeddings):
            _fill(module.position_embedding.weight, 0.9, generator)
        elif isinstance(module, RMSNorm | nn.LayerNorm):
            nn.init.ones_(module.weight)
    _fill(model.backbone.text_model.embed_tokens.weight, STREAM / math.sqrt(config.text.hidden), generator)


def _std(name: str, module: nn.Linear | nn.Conv2d, config: SmolVLAConfig) -> float:
    unit = float(module.weight[0].numel() ** -0.5)
    if name.endswith("modality_projection.proj"):
        return unit * STREAM / math.sqrt(config.text.hidden)
    if name == "state_proj":
        return STREAM / math.sqrt(config.state_dim)
    if name == "action_out_proj":
        return 0.1 * unit
    if name.endswith(("out_proj", "fc2", "o_proj", "down_proj")):
        return 0.3 * unit * (STREAM if "text_model" in name else 1.0)
    return unit


def _fill(parameter: torch.Tensor, std: float, generator: torch.Generator) -> None:
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
