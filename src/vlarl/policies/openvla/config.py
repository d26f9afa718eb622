"""An OpenVLA checkpoint's config.json as a frozen record: every size of the model comes from here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

DecoderName = Literal["autoregressive", "parallel"]
DECODER_NAMES: tuple[DecoderName, ...] = ("autoregressive", "parallel")

LLAMA_EMPTY_TOKEN = 29871  # Llama's lone "▁": the original training data has it between "Out:" and the action
NATIVE_KEY = "vlarl"  # what the original layout has no field for lives under this one key


@dataclass(frozen=True)
class TowerConfig:
    """One vision transformer, in timm's terms."""

    timm_id: str
    image_size: int
    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    num_registers: int
    class_token: bool
    layer_scale: bool
    attention_pool: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def num_patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def mlp_dim(self) -> int:
        """Width of the blocks' MLPs, rounded down as timm does."""
        return int(self.embed_dim * self.mlp_ratio)


# The two towers of the published checkpoints; `timm_model_kwargs` of a config.json overrides their sizes.
KNOWN_TOWERS: dict[str, TowerConfig] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerConfig(
        timm_id="vit_large_patch14_reg4_dinov2.lvd142m",
        image_size=224,
        patch_size=14,
        embed_dim=1024,
        depth=24,
        num_heads=16,
        mlp_ratio=4.0,
        num_registers=4,
        class_token=True,
        layer_scale=True,
        attention_pool=False,
        mean=(0.484375, 0.455078125, 0.40625),
        std=(0.228515625, 0.2236328125, 0.224609375),
    ),
    "vit_so400m_patch14_siglip_224": TowerConfig(
        timm_id="vit_so400m_patch14_siglip_224",
        image_size=224,
        patch_size=14,
        embed_dim=1152,
        depth=27,
        num_heads=16,
        mlp_ratio=3.7362,
        num_registers=0,
        class_token=False,
        layer_scale=False,
        attention_pool=True,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    ),
}

# timm's constructor argument -> our field
TIMM_ARGUMENTS = {
    "embed_dim": "embed_dim",
    "depth": "depth",
    "num_heads": "num_heads",
    "mlp_ratio": "mlp_ratio",
    "patch_size": "patch_size",
    "reg_tokens": "num_registers",
}


@dataclass(frozen=True)
class OpenVLAConfig:
    """Sizes, statistics and decoding of one OpenVLA checkpoint."""

    towers: tuple[TowerConfig, ...]
    text: Mapping[str, Any]  # keyword arguments of the language model's transformers config
    norm_stats: Mapping[str, Mapping[str, Any]]
    num_action_bins: int
    pad_to_multiple_of: int
    pad_token_id: int
    decoder: DecoderName
    chunk_length: int
    action_dim: int
    num_images: int
    use_proprio: bool
    proprio_dim: int
    prompt_suffix_id: int | None  # appended to the prompt where absent; None for tokenizers that need none
    stop_id: int  # closes the sequence of the parallel decoder
    learned_slots: bool  # the parallel decoder's slots are padding rows of the embedding instead of OFT's zeros
    raw: Mapping[str, Any]  # the file as it was read, so that saving keeps fields we don't use

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the language model's head."""
        return int(self.text["vocab_size"])

    @property
    def vocab_size(self) -> int:
        """Vocabulary without the padding rows: one more than the highest action id."""
        return self.padded_vocab_size - self.pad_to_multiple_of

    @property
    def first_action_id(self) -> int:
        """Lowest action id."""
        return self.vocab_size - self.num_action_bins

    @property
    def num_action_tokens(self) -> int:
        """Tokens of one decision, K*D."""
        return self.chunk_length * self.action_dim

    @property
    def image_size(self) -> int:
        """Side of the square images that the towers read."""
        return self.towers[0].image_size

    def with_decoder(
        self,
        decoder: DecoderName | None = None,
        chunk_length: int | None = None,
        num_images: int | None = None,
        use_proprio: bool | None = None,
    ) -> OpenVLAConfig:
        """The same checkpoint decoded another way; None keeps what the file says."""
        chosen = decoder or self.decoder
        length = chunk_length or (self.chunk_length if chosen == self.decoder else default_chunk_length(chosen))
        if chosen not in DECODER_NAMES:
            raise ValueError(f"decoder {chosen!r} is unknown: use one of {', '.join(DECODER_NAMES)}")
        if chosen == "autoregressive" and length != 1:
            raise ValueError(
                f"chunk_length {length} with the autoregressive decoder: it writes one action a call; "
                "use chunk_length 1 or decoder 'parallel'"
            )
        rows, slots = self.pad_to_multiple_of, length * self.action_dim
        if chosen == "parallel" and self.learned_slots and slots > rows:
            raise ValueError(
                f"chunk_length {length} needs {slots} learned slots, but the embedding has {rows} padding rows for "
                "them: use a shorter chunk or learned_slots=False"
            )
        return replace(
            self,
            decoder=chosen,
            chunk_length=length,
            num_images=num_images or self.num_images,
            use_proprio=self.use_proprio if use_proprio is None else use_proprio,
        )

    def to_json(self) -> dict[str, Any]:
        """The content of config.json: the file as read, with our own key brought up to date."""
        native = {
            "decoder": self.decoder,
            "chunk_length": self.chunk_length,
            "action_dim": self.action_dim,
            "num_images": self.num_images,
            "use_proprio": self.use_proprio,
            "proprio_dim": self.proprio_dim,
            "prompt_suffix_id": self.prompt_suffix_id,
            "stop_id": self.stop_id,
            "learned_slots": self.learned_slots,
        }
        return {**self.raw, "norm_stats": dict(self.norm_stats), NATIVE_KEY: native}


def default_chunk_length(decoder: DecoderName) -> int:
    """Actions a call writes when nothing says otherwise: OFT's 8, or the 1 of the original model."""
    return 8 if decoder == "parallel" else 1


def parse_config(raw: Mapping[str, Any]) -> OpenVLAConfig:
    """Read the content of a config.json; fields that only our own checkpoints have get the original's defaults."""
    missing = [key for key in ("timm_model_ids", "image_sizes", "text_config") if key not in raw]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}: it is not an OpenVLA checkpoint's")
    native = raw.get(NATIVE_KEY, {})
    decoder = cast(DecoderName, native.get("decoder", "autoregressive"))
    text = dict(raw["text_config"])
    if "vocab_size" not in text:
        raise ValueError("config.json lacks vocab_size in its text_config, which the action ids follow from")
    text.setdefault("model_type", "llama")
    suffix = LLAMA_EMPTY_TOKEN if text["model_type"] == "llama" else None
    return OpenVLAConfig(
        towers=_parse_towers(raw),
        text=text,
        norm_stats=dict(raw.get("norm_stats") or {}),
        num_action_bins=int(raw.get("n_action_bins", 256)),
        pad_to_multiple_of=int(raw.get("pad_to_multiple_of", 64)),
        pad_token_id=int(raw.get("pad_token_id", 32000)),
        decoder=decoder,
        chunk_length=int(native.get("chunk_length", default_chunk_length(decoder))),
        action_dim=int(native.get("action_dim", 7)),
        num_images=int(native.get("num_images", 1)),
        use_proprio=bool(native.get("use_proprio", False)),
        proprio_dim=int(native.get("proprio_dim", 8)),
        prompt_suffix_id=native.get("prompt_suffix_id", suffix),
        stop_id=int(native.get("stop_id", 2)),
        learned_slots=bool(native.get("learned_slots", False)),
        raw=dict(raw),
    ).with_decoder()


def read_config(folder: Path) -> OpenVLAConfig:
    """Read config.json and, where it is beside it, dataset_statistics.json, whose entries win."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give a checkpoint folder in the Hugging Face layout")
    raw = read_json(path)
    try:
        config = parse_config(raw)
    except (KeyError, TypeError, AttributeError) as error:  # a field of another kind than the layout's
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is malformed ({reason}): copy or download it again") from error
    statistics = folder / "dataset_statistics.json"
    if statistics.is_file():
        config = replace(config, norm_stats={**config.norm_stats, **read_json(statistics)})
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a broken file is named."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _parse_towers(raw: Mapping[str, Any]) -> tuple[TowerConfig, ...]:
    ids = list(raw["timm_model_ids"])
    sizes = list(raw["image_sizes"])
    overrides = list(raw.get("timm_model_kwargs") or [{}] * len(ids))
    activations = [a for a in raw.get("timm_override_act_layers") or [] if a is not None]
    if activations:
        raise ValueError(f"timm_override_act_layers {activations} is not supported: the known towers use GELU")
    expected = 2 if raw.get("use_fused_vision_backbone", len(ids) == 2) else 1
    if not len(ids) == len(sizes) == len(overrides) == expected:
        raise ValueError(
            f"config.json names {len(ids)} towers, {len(sizes)} image sizes and {len(overrides)} timm_model_kwargs, "
            f"but use_fused_vision_backbone asks for {expected} of each"
        )
    if len(set(sizes)) != 1:
        raise ValueError(f"image_sizes {sizes} differ: both towers read the same pixels, so the sizes must be equal")
    towers = tuple(_parse_tower(i, int(s), o or {}) for i, s, o in zip(ids, sizes, overrides, strict=True))
    if len({t.patch_size for t in towers}) != 1:
        raise ValueError("the towers' patch sizes differ, so their features can't stand side by side")
    return towers


def _parse_tower(timm_id: str, image_size: int, overrides: Mapping[str, Any]) -> TowerConfig:
    if timm_id not in KNOWN_TOWERS:
        raise ValueError(f"timm_model_ids: {timm_id!r} is not supported; known are {', '.join(KNOWN_TOWERS)}")
    unknown = [key for key in overrides if key not in TIMM_ARGUMENTS]
    if unknown:
        raise ValueError(
            f"timm_model_kwargs of {timm_id}: {', '.join(unknown)} not supported; known are {', '.join(TIMM_ARGUMENTS)}"
        )
    fields = {TIMM_ARGUMENTS[key]: value for key, value in overrides.items()}
    tower = replace(KNOWN_TOWERS[timm_id], image_size=image_size, **fields)
    if image_size % tower.patch_size:
        raise ValueError(f"image size {image_size} is not a multiple of the patch size {tower.patch_size}")
    return tower
