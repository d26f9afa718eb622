"""The built-in tiny model: OpenVLA's architecture at about 4 M parameters, with its own small tokenizer.

Most parameters sit in the vision towers, which see 16 tokens an image, so that a forward pass stays near 200 MFLOP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.decoders import Sequence as DecoderSequence
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from torch import nn

from vlarl.policies.openvla.config import NATIVE_KEY, DecoderName, OpenVLAConfig, parse_config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.vision import LayerScale, VisionTower

STATISTICS_KEY = "tabletop"
TEXT_VOCAB_SIZE = 768  # ids below it are text; the 256 action ids follow, then the padding rows
NUM_ACTION_BINS = 256
PAD_TO_MULTIPLE_OF = 64
ACTION_DIM = 7
PROPRIO_DIM = 8
IMAGE_SIZE = 56

PROMPT_PREFIX = "In: What action should the robot take to"
PROMPT_SUFFIX = "?\nOut:"
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
WORDS = (
    "the a an and or of to in into on onto from at by with it its them both that which is are near then while not "
    "pick up place put push pull turn open close lift move slide grasp grab take bring set stack reach touch rotate "
    "flip press pour drop hold release insert remove hang cover wipe sweep shake switch off out down over under above "
    "below behind beside between next front back left right middle center centre corner edge side top bottom inside "
    "outside around across toward towards away closest farthest nearest far upper lower first second third other "
    "another same red green blue yellow orange purple pink brown black white gray grey cyan magenta gold silver dark "
    "light small large big little tall short long wide round square flat empty full wooden metal plastic glass cube "
    "block ball sphere cylinder disc disk ring cone box bowl plate ramekin basket milk butter ketchup soup sauce "
    "cheese cream stove drawer cabinet wine bottle mug moka pot pan rack tray book caddy can juice pudding chocolate "
    "tomato alphabet salad dressing bbq cookie cookies frying kettle cup lid spoon fork knife table desk shelf "
    "microwave sink bin bag jar tin towel cloth paper pen pencil marker eraser toy car duck bear banana apple lemon "
    "lime pear peach carrot corn egg eggs bread donut cake rice beans popcorn cereal coffee tea water oil salt pepper "
    "sugar handle knob button lever door window wall floor target goal zone region area spot mark line row object "
    "objects thing item items one two three four five robot arm gripper hand compartment layer stand holder coaster "
    "mat board sponge hammer screwdriver wrench drill peg hole nut bolt"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "padding_side": "right",
    "clean_up_tokenization_spaces": False,
}
PIECES = ("s", "es", "ed", "ing", "er", "est", "ly", "▁un", "▁re", "'s")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,'-_:;!?()/"


def build_tiny_tokenizer(
    special: Sequence[str] = SPECIAL_TOKENS, phrases: Sequence[str] = (PROMPT_PREFIX, PROMPT_SUFFIX)
) -> Tokenizer:
    """One token for each phrase, such as the sides of the prompt, and each common word; letters and bytes for the rest.

    Without phrases, a text begins with a word.
    """
    vocab: dict[str, float] = dict.fromkeys(special, 0.0)
    vocab |= {f"<0x{byte:02X}>": -20.0 for byte in range(256)}
    vocab |= dict.fromkeys(phrases, 0.0)
    # Scores rank the pieces: a whole word beats its parts, an ending beats its letters, letters beat bytes.
    vocab |= {character: -6.0 for character in ("▁", *CHARACTERS)}
    vocab |= {piece: -5.0 for piece in PIECES if piece not in vocab}
    vocab |= {f"▁{word}": -3.0 for word in WORDS.split()}
    if len(vocab) > TEXT_VOCAB_SIZE:
        raise ValueError(f"{len(vocab)} text tokens exceed the {TEXT_VOCAB_SIZE} ids below the action ids")
    tokenizer = Tokenizer(Unigram(list(vocab.items()), unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="never" if phrases else "first")
    tokenizer.decoder = DecoderSequence([ByteFallback(), MetaspaceDecoder(prepend_scheme="never"), Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in phrases])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


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
) -> OpenVLAConfig:
    """The configuration of the built-in model; proprio bounds are those of its robot.

    `norm_stats` are more statistics by key, for robots and suites other than the tabletop.
    """
    vocab_size = TEXT_VOCAB_SIZE + NUM_ACTION_BINS + PAD_TO_MULTIPLE_OF
    raw: dict[str, Any] = {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "arch_specifier": "no-align+fused-gelu-mlp",
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "use_fused_vision_backbone": True,
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "timm_model_kwargs": [
            {"embed_dim": 128, "depth": 5, "num_heads": 4, "reg_tokens": 1},
            {"embed_dim": 128, "depth": 5, "num_heads": 4, "mlp_ratio": 4.0},
        ],
        "image_sizes": [image_size, image_size],
        "image_resize_strategy": "resize-naive",
        "n_action_bins": NUM_ACTION_BINS,
        "pad_to_multiple_of": PAD_TO_MULTIPLE_OF,
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
        "text_config": {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 160,
            "intermediate_size": 352,
            "num_hidden_layers": 3,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
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
