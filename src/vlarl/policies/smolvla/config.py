"""A SmolVLA checkpoint's config.json, and that of its backbone, as a frozen dataclass: every size comes from here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from vlarl.policies.checkpoint_json import read_json, whole

IMAGES, STATE, ACTION = "observation.images", "observation.state", "action"
EMPTY_CAMERA = f"{IMAGES}.empty_camera_"  # views that nothing is shown to and nothing attends to
LARGEST_CHUNK, LARGEST_IMAGE, LARGEST_LAYERS, LARGEST_WIDTH = 4096, 8192, 1024, 1 << 16
DEFAULT_NORM_MODES = {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
EXPERT_MULTIPLE = 256  # the expert's inner width is rounded up to a multiple of this


@dataclass(frozen=True)
class TowerSizes:
    """The vision tower, and how its patches become tokens."""

    hidden: int
    inner: int
    layers: int
    heads: int
    patch: int
    image: int  # pixels of a side
    eps: float
    merged: int  # so many patches of a row and of a column become one token
    shifted: bool  # patches have the positions 0, 0, 1, …, n - 2 in float32, see `_shifts_positions`

    @property
    def tokens(self) -> int:
        """Tokens of one image."""
        return (self.image // self.patch // self.merged) ** 2


@dataclass(frozen=True)
class TextSizes:
    """A stack of decoder layers."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    attention_bias: bool
    mlp_bias: bool


@dataclass(frozen=True)
class SmolVLAConfig:
    """Sizes and conventions of one SmolVLA checkpoint."""

    tower: TowerSizes
    text: TextSizes
    expert: TextSizes
    vocab_size: int
    pad_token_id: int
    views: tuple[str, ...]  # the image features in their order, without empty cameras
    view_shape: tuple[int, int]  # height and width that the first view was declared with
    state_dim: int
    action_dim: int
    max_state_dim: int
    max_action_dim: int
    chunk_size: int  # actions that the expert predicts
    n_action_steps: int  # of which the first are executed
    num_steps: int  # of denoising
    max_tokens: int  # of an instruction
    self_attn_every: int
    min_period: float
    max_period: float
    norm_modes: Mapping[str, str]  # STATE and ACTION -> MEAN_STD, MIN_MAX, QUANTILES, QUANTILE10 or IDENTITY
    backbone: str  # vlm_model_name
    raw: Mapping[str, Any]  # config.json as it was read

    def attends_jointly(self, layer: int) -> bool:
        """Whether the expert's layer attends to the prefix and to itself; the others only to the prefix."""
        return self.self_attn_every > 0 and layer % self.self_attn_every == 0


def parse_config(raw: Mapping[str, Any], backbone: Mapping[str, Any]) -> SmolVLAConfig:
    """From the content of both config.json files; ValueError for what the family does not support."""
    _refuse_unsupported(raw)
    inputs, outputs = (_features(raw, name) for name in ("input_features", "output_features"))
    views = tuple(name for name, kind in inputs.items() if kind["type"] == "VISUAL" and EMPTY_CAMERA not in name)
    if not views or STATE not in inputs or ACTION not in outputs:
        raise ValueError(f"its features lack an image, {STATE} or {ACTION}: it is not the config of a SmolVLA policy")
    tower, text, vocab_size, pad_id = _backbone_sizes(backbone, raw)
    size = raw.get("resize_imgs_with_padding")
    if size is None or list(size) != [tower.image] * 2:
        raise ValueError(f"resize_imgs_with_padding is {size}; the backbone's tower reads {tower.image} pixels a side")
    chunk = whole(raw.get("chunk_size", 50), "chunk_size", 1, LARGEST_CHUNK)
    state_dim, action_dim = _dimensions(inputs[STATE], STATE), _dimensions(outputs[ACTION], ACTION)
    shape = inputs[views[0]].get("shape") or [3, tower.image, tower.image]
    return SmolVLAConfig(
        tower=tower,
        text=text,
        expert=_expert_sizes(text, raw),
        vocab_size=vocab_size,
        pad_token_id=pad_id,
        views=views,
        view_shape=(whole(shape[1], "a view's height", 1, LARGEST_IMAGE), whole(shape[2], "width", 1, LARGEST_IMAGE)),
        state_dim=state_dim,
        action_dim=action_dim,
        max_state_dim=whole(raw.get("max_state_dim", 32), "max_state_dim", state_dim, LARGEST_CHUNK),
        max_action_dim=whole(raw.get("max_action_dim", 32), "max_action_dim", action_dim, LARGEST_CHUNK),
        chunk_size=chunk,
        n_action_steps=whole(raw.get("n_action_steps", chunk), "n_action_steps", 1, chunk),
        num_steps=whole(raw.get("num_steps", 10), "num_steps", 1, LARGEST_CHUNK),
        max_tokens=whole(raw.get("tokenizer_max_length", 48), "tokenizer_max_length", 1, LARGEST_CHUNK),
        self_attn_every=whole(raw.get("self_attn_every_n_layers", 2), "self_attn_every_n_layers", -1, LARGEST_LAYERS),
        min_period=_positive(raw.get("min_period", 4e-3), "min_period"),
        max_period=_positive(raw.get("max_period", 4.0), "max_period"),
        norm_modes=dict(raw.get("normalization_mapping") or DEFAULT_NORM_MODES),
        backbone=str(raw.get("vlm_model_name", "HuggingFaceTB/SmolVLM2-500M-Video-Instruct")),
        raw=dict(raw),
    )


def read_config(folder: Path, backbone: Path) -> SmolVLAConfig:
    """Read both config.json files; the error for a malformed one names it."""
    path = folder / "config.json"
    try:
        return parse_config(read_json(path), read_json(backbone / "config.json"))
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:  # a field of the wrong type
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} or its backbone's is malformed ({reason}): copy or download it again") from error
    except ValueError as error:
        raise ValueError(str(error) if path.name in str(error) else f"{path}: {error}") from error


UNSUPPORTED = {  # fields, with the value that is supported
    "attention_mode": "cross_attn",
    "add_image_special_tokens": False,
    "adapt_to_pi_aloha": False,
    "use_delta_joint_actions_aloha": False,
    "n_obs_steps": 1,
}


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for name, supported in UNSUPPORTED.items():
        if raw.get(name, supported) != supported:
            raise ValueError(f"{name} is {raw[name]!r}, and only {supported!r} is supported: use another checkpoint")


def _features(raw: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    found = raw.get(name)
    if not isinstance(found, dict) or not all(isinstance(f, dict) and "type" in f for f in found.values()):
        raise ValueError(f"{name} of config.json must be an object of features, each with type and shape")
    return found


def _dimensions(feature: Mapping[str, Any], name: str) -> int:
    return whole(feature["shape"][0], f"the dimension of {name}", 1, LARGEST_CHUNK)


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} is {str(value)[:40]!r}, which must be positive")
    return float(value)


def _backbone_sizes(content: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[TowerSizes, TextSizes, int, int]:
    """Tower, language model, vocabulary and padding of the backbone; those of the library where it says nothing."""
    from transformers import SmolVLMConfig  # imported here: it takes seconds to load

    if content.get("model_type") != "smolvlm":
        raise ValueError(f"its backbone is of type {content.get('model_type')!r}, and only SmolVLM is supported")
    library = SmolVLMConfig(**{k: v for k, v in content.items() if k not in ("model_type", "dtype", "torch_dtype")})
    vision, text = cast(Any, library.vision_config), cast(Any, library.text_config)

    def size(config: Any, name: str, high: int = LARGEST_WIDTH) -> int:
        return whole(getattr(config, name, None), f"{name} of the backbone", 1, high)

    stored = size(text, "num_hidden_layers", LARGEST_LAYERS)
    kept = whole(raw.get("num_vlm_layers", 16), "num_vlm_layers", -1, LARGEST_LAYERS)
    tower = TowerSizes(
        hidden=size(vision, "hidden_size"),
        inner=size(vision, "intermediate_size"),
        layers=size(vision, "num_hidden_layers", LARGEST_LAYERS),
        heads=size(vision, "num_attention_heads"),
        patch=size(vision, "patch_size", LARGEST_IMAGE),
        image=size(vision, "image_size", LARGEST_IMAGE),
        eps=float(vision.layer_norm_eps),
        merged=size(library, "scale_factor", 64),
        shifted=_shifts_positions(content.get("transformers_version")),
    )
    if tower.image % (tower.patch * tower.merged) or tower.hidden % tower.heads:
        raise ValueError(f"a tower of {tower.image} pixels can't be divided into patches of {tower.patch}")
    if getattr(vision, "hidden_act", "") != "gelu_pytorch_tanh" or getattr(text, "hidden_act", "") != "silu":
        raise ValueError("the backbone has other activations than SmolVLM's: gelu_pytorch_tanh and silu")
    heads = size(text, "num_attention_heads")
    sizes = TextSizes(
        hidden=size(text, "hidden_size"),
        inner=size(text, "intermediate_size"),
        layers=min(kept, stored) if kept > 0 else stored,
        heads=heads,
        kv_heads=size(text, "num_key_value_heads"),
        head_dim=whole(getattr(text, "head_dim", None) or text.hidden_size // heads, "head_dim", 1, LARGEST_WIDTH),
        eps=float(text.rms_norm_eps),
        attention_bias=bool(getattr(text, "attention_bias", False)),
        mlp_bias=bool(getattr(text, "mlp_bias", False)),
    )
    pad = getattr(library, "pad_token_id", None)
    return tower, sizes, size(text, "vocab_size", 1 << 24), 0 if pad is None else int(pad)


def _shifts_positions(version: object) -> bool:
    """Whether the library of this version gives patch i the position i - 1: from 4.55.1 on, and not in 5 any more, it
    multiplied coordinates by 1 - 1e-6 before it looked for their position (transformers issue 41190). In bfloat16, in
    which SmolVLA is trained, the factor is 1 and nothing shifts.
    """
    parts = [int(part) for part in re.findall(r"\d+", str(version or ""))[:3]]
    return [4, 55, 1] <= parts < [5]


def _expert_sizes(text: TextSizes, raw: Mapping[str, Any]) -> TextSizes:
    """The expert has the language model's heads, and a width of its own."""
    layers = whole(raw.get("num_expert_layers", -1), "num_expert_layers", -1, LARGEST_LAYERS)
    if layers > 0 and layers != text.layers:
        raise ValueError(
            f"num_expert_layers is {layers}: only as many as the language model's {text.layers} are supported"
        )
    hidden = int(text.hidden * _positive(raw.get("expert_width_multiplier", 0.75), "expert_width_multiplier"))
    if hidden < 2 or hidden % 2:
        raise ValueError(f"expert_width_multiplier makes an expert of width {hidden}, which must be even")
    inner = int(4 * int(2 * hidden / 3))
    return TextSizes(
        hidden=hidden,
        inner=EXPERT_MULTIPLE * ((inner + EXPERT_MULTIPLE - 1) // EXPERT_MULTIPLE),
        layers=text.layers,
        heads=text.heads,
        kv_heads=text.kv_heads,
        head_dim=text.head_dim,
        eps=text.eps,
        attention_bias=text.attention_bias,
        mlp_bias=text.mlp_bias,
    )
