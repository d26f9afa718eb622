"""An OpenVLA checkpoint's config.json as a frozen dataclass: every size of the model comes from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from vlarl.policies.checkpoint_json import read_json, whole
from vlarl.policies.openvla.limits import LARGEST_CHUNK, LARGEST_IMAGE, LARGEST_NUM_BINS, LARGEST_NUM_IMAGES
from vlarl.policies.openvla.text_families import FAMILIES, action_end, model_type, prompt_template
from vlarl.policies.openvla.towers import (
    KNOWN_TOWERS,
    TIMM_ARGUMENTS,
    VISION_BACKBONES,
    Activation,
    TowerConfig,
    default_activation,
)

DecoderName = Literal["autoregressive", "parallel"]
DECODER_NAMES: tuple[DecoderName, ...] = ("autoregressive", "parallel")

NATIVE_KEY = "vlarl"  # the key in config.json for everything that the original layout has no field for
INSTRUCTION = "{instruction}"
LARGEST_PIXEL = 255.0
SHORTEST_PROMPT = 32  # tokens reserved for a prompt: the template and an instruction of a few words


@dataclass(frozen=True)
class OpenVLAConfig:
    """Sizes, statistics and decoding of one OpenVLA checkpoint."""

    towers: tuple[TowerConfig, ...]
    text: Mapping[str, Any]  # keyword arguments of the language model's transformers config
    norm_stats: Mapping[str, Mapping[str, Any]]
    num_action_bins: int
    vocab_size: int  # one more than the highest action id
    pad_to_multiple_of: int
    pad_token_id: int
    decoder: DecoderName
    chunk_length: int
    action_dim: int
    num_images: int
    use_proprio: bool
    proprio_dim: int
    use_film: bool  # the prompt modulates the vision blocks, as in OFT+
    prompt_template: str  # with {instruction}
    bos_id: int | None  # first token of a prompt; None for tokenizers without such a token
    prompt_suffix_id: int | None  # appended to the prompt if absent; None for tokenizers that need none
    stop_id: int  # ends the sequence of the parallel decoder
    learned_slots: bool  # the parallel decoder's slots are padding rows of the embedding instead of OFT's zeros
    untrained_tokens: bool  # the regression head was trained, and the action tokens were not trained with it
    raw: Mapping[str, Any]  # the file as it was read, so that saving keeps fields we don't use
    norm_stats_files: Mapping[str, Path] = field(default_factory=dict)  # the file of each of the statistics

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the language model's head."""
        return int(self.text["vocab_size"])

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

    @property
    def num_image_tokens(self) -> int:
        """Tokens of one observation before the text: the patches of all images, and the robot's state."""
        return self.num_images * self.towers[0].num_patches + self.use_proprio

    @property
    def max_positions(self) -> int:
        """Positions that the language model was made for."""
        return int(language_config(self.text).max_position_embeddings)

    def with_decoder(
        self,
        decoder: DecoderName | None = None,
        chunk_length: int | None = None,
        num_images: int | None = None,
        use_proprio: bool | None = None,
        use_film: bool | None = None,
    ) -> OpenVLAConfig:
        """The same checkpoint with another decoding; None keeps the file's value."""
        chosen = decoder or self.decoder
        length = chunk_length or (self.chunk_length if chosen == self.decoder else default_chunk_length(chosen))
        if chosen not in DECODER_NAMES:
            raise ValueError(f"decoder {chosen!r} is unknown: use one of {', '.join(DECODER_NAMES)}")
        if chosen == "autoregressive" and length != 1:
            raise ValueError(
                f"chunk_length {length} with the autoregressive decoder: it generates one action a call; "
                "use chunk_length 1 or decoder 'parallel'"
            )
        rows, slots = self.padded_vocab_size - self.vocab_size, length * self.action_dim
        if chosen == "parallel" and self.learned_slots and slots > rows:
            raise ValueError(
                f"chunk_length {length} needs {slots} learned slots, but the embedding has {rows} padding rows for "
                "them: use a shorter chunk or learned_slots=False"
            )
        changed = replace(
            self,
            decoder=chosen,
            chunk_length=length,
            num_images=num_images or self.num_images,
            use_proprio=self.use_proprio if use_proprio is None else use_proprio,
            use_film=self.use_film if use_film is None else use_film,
        )
        changed._check_sequence()
        return changed

    def _check_sequence(self) -> None:
        if self.use_film and self.decoder != "parallel":
            raise ValueError("use_film with the autoregressive decoder: FiLM belongs to OFT, use decoder 'parallel'")
        needed = self.num_image_tokens + SHORTEST_PROMPT + self.num_action_tokens + 1
        if needed > self.max_positions:
            raise ValueError(
                f"{self.num_images} images of {self.towers[0].num_patches} tokens and {self.num_action_tokens} action "
                f"tokens with the shortest prompt take {needed} positions, but the language model has "
                f"{self.max_positions} (text_config.max_position_embeddings): use fewer images or a shorter chunk"
            )

    def to_json(self) -> dict[str, Any]:
        """The content of config.json: the file as read, with our own key updated."""
        native = {
            "decoder": self.decoder,
            "chunk_length": self.chunk_length,
            "action_dim": self.action_dim,
            "num_images": self.num_images,
            "use_proprio": self.use_proprio,
            "proprio_dim": self.proprio_dim,
            "use_film": self.use_film,
            "vocab_size": self.vocab_size,
            "prompt_template": self.prompt_template,
            "bos_id": self.bos_id,
            "prompt_suffix_id": self.prompt_suffix_id,
            "stop_id": self.stop_id,
            "learned_slots": self.learned_slots,
            "untrained_tokens": self.untrained_tokens,
        }
        return {**self.raw, "norm_stats": dict(self.norm_stats), NATIVE_KEY: native}


def default_chunk_length(decoder: DecoderName) -> int:
    """Actions per call by default: OFT's 8, or the original model's 1."""
    return 8 if decoder == "parallel" else 1


def language_config(text: Mapping[str, Any]) -> Any:
    """The transformers config of a `text_config`; absent fields get the library's defaults for its model_type."""
    from transformers import AutoConfig  # imported here: it takes seconds to load

    arguments = {k: v for k, v in text.items() if k not in ("model_type", "torch_dtype", "dtype")}
    try:
        config = AutoConfig.for_model(text["model_type"], **arguments)
    except Exception as error:  # what the library raises for values of the wrong type is not documented
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"text_config can't be read ({reason}): copy or download config.json again") from error
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        whole(getattr(config, name, None), f"{name} of text_config", 1)
    whole(config.max_position_embeddings, "max_position_embeddings of text_config", 1)
    return config


def missing_fields(raw: Mapping[str, Any]) -> list[str]:
    """Fields of every OpenVLA checkpoint that a config.json lacks."""
    towers_known = "timm_model_ids" in raw or raw.get("vision_backbone_id") in VISION_BACKBONES
    return [*([] if towers_known else ["timm_model_ids"]), *([] if "text_config" in raw else ["text_config"])]


def refuse_other_model(raw: Mapping[str, Any]) -> None:
    """Refuse another model's config.json."""
    if missing := missing_fields(raw):
        raise ValueError(f"config.json lacks {', '.join(missing)}: it is not an OpenVLA checkpoint's")


def parse_config(raw: Mapping[str, Any]) -> OpenVLAConfig:
    """Read the content of a config.json; fields that only our own checkpoints have get the original's defaults."""
    refuse_other_model(raw)
    native = raw.get(NATIVE_KEY, {})
    decoder = cast(DecoderName, native.get("decoder", "autoregressive"))
    kind = model_type(raw)
    text = {**raw["text_config"], "model_type": kind}
    if "vocab_size" not in text:
        raise ValueError("config.json lacks vocab_size in its text_config, which the action ids follow from")
    family, padding = FAMILIES[kind], whole(raw.get("pad_to_multiple_of", 64), "pad_to_multiple_of", 0)
    rows = whole(text["vocab_size"], "vocab_size of text_config", 1)
    bos = native.get("bos_id", text.get("bos_token_id", 1) if family.has_bos else None)
    suffix = native.get("prompt_suffix_id", family.prompt_suffix_id)
    config = OpenVLAConfig(
        towers=_parse_towers(raw),
        text=text,
        norm_stats=_statistics(raw.get("norm_stats") or {}),
        num_action_bins=whole(raw.get("n_action_bins", 256), "n_action_bins", 2, LARGEST_NUM_BINS),
        vocab_size=whole(native.get("vocab_size", action_end(raw, kind, rows, padding)), "vocab_size", 1),
        pad_to_multiple_of=padding,
        pad_token_id=whole(raw.get("pad_token_id", family.pad_token_id), "pad_token_id", 0),
        decoder=decoder,
        chunk_length=whole(native.get("chunk_length", default_chunk_length(decoder)), "chunk_length", 1, LARGEST_CHUNK),
        action_dim=whole(native.get("action_dim", 7), "action_dim", 1, LARGEST_CHUNK),
        num_images=whole(native.get("num_images", 1), "num_images", 1, LARGEST_NUM_IMAGES),
        use_proprio=bool(native.get("use_proprio", False)),
        proprio_dim=whole(native.get("proprio_dim", 8), "proprio_dim", 1, LARGEST_CHUNK),
        use_film=bool(native.get("use_film", False)),
        prompt_template=_prompt(native.get("prompt_template", prompt_template(raw, kind))),
        bos_id=None if bos is None else whole(bos, "bos_id", 0),
        prompt_suffix_id=None if suffix is None else whole(suffix, "prompt_suffix_id", 0),
        stop_id=whole(native.get("stop_id", family.stop_id), "stop_id", 0),
        learned_slots=bool(native.get("learned_slots", False)),
        untrained_tokens=bool(native.get("untrained_tokens", False)),
        raw=dict(raw),
    )
    if not config.num_action_bins <= config.vocab_size <= config.padded_vocab_size:
        raise ValueError(
            f"action ids {config.first_action_id}..{config.vocab_size - 1} exceed the vocabulary's "
            f"{config.padded_vocab_size} rows: say where they end with vocab_size under {NATIVE_KEY!r} in config.json"
        )
    return config.with_decoder()


def _statistics(content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(
            f"norm_stats is a {type(content).__name__}, which must be an object of statistics by their keys"
        )
    return dict(content)


def _prompt(template: object) -> str:
    if not isinstance(template, str) or template.count(INSTRUCTION) != 1:
        raise ValueError(f"prompt_template is {str(template)[:80]!r}, which must be text with one {INSTRUCTION} in it")
    return template


def read_config(folder: Path) -> OpenVLAConfig:
    """Read config.json and, if present, dataset_statistics.json and the pixel statistics, which take precedence."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give a checkpoint folder in the Hugging Face layout")
    raw = read_json(path)
    try:
        config = parse_config(raw)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:  # a field of the wrong type
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is malformed ({reason}): copy or download it again") from error
    except ValueError as error:
        raise ValueError(str(error) if path.name in str(error) else f"{path}: {error}") from error
    files = dict.fromkeys(config.norm_stats, path)
    config = replace(config, norm_stats_files=files)
    config = replace(config, towers=_with_pixel_statistics(config.towers, folder / "preprocessor_config.json"))
    return with_statistics(config, folder / "dataset_statistics.json")


def with_statistics(config: OpenVLAConfig, path: Path) -> OpenVLAConfig:
    """The config with the statistics of a file, if it exists; they take precedence."""
    if not path.is_file():
        return config
    found = read_json(path)
    files = {**config.norm_stats_files, **dict.fromkeys(found, path)}
    return replace(config, norm_stats={**config.norm_stats, **found}, norm_stats_files=files)


def _parse_towers(raw: Mapping[str, Any]) -> tuple[TowerConfig, ...]:
    known_ids, known_size = VISION_BACKBONES.get(str(raw.get("vision_backbone_id")), ((), 0))
    ids = list(raw.get("timm_model_ids") or known_ids)
    if "image_sizes" not in raw and tuple(ids) != known_ids:
        raise ValueError("config.json lacks image_sizes, and its vision_backbone_id does not identify its towers")
    sizes = list(raw.get("image_sizes") or [known_size] * len(ids))
    overrides = list(raw.get("timm_model_kwargs") or [{}] * len(ids))
    activations = list(raw.get("timm_override_act_layers") or [default_activation(i) for i in ids])
    expected = 2 if raw.get("use_fused_vision_backbone", len(ids) == 2) else 1
    if not len(ids) == len(sizes) == len(overrides) == len(activations) == expected:
        raise ValueError(
            f"config.json names {len(ids)} towers, {len(sizes)} image sizes, {len(overrides)} timm_model_kwargs and "
            f"{len(activations)} timm_override_act_layers, but use_fused_vision_backbone requires {expected} of each"
        )
    if len(set(sizes)) != 1:
        raise ValueError(f"image_sizes {sizes} differ: both towers read the same pixels, so the sizes must be equal")
    towers = tuple(
        _parse_tower(i, whole(size, "image_sizes", 1, LARGEST_IMAGE), override or {}, activation or "gelu")
        for i, size, override, activation in zip(ids, sizes, overrides, activations, strict=True)
    )
    if len({t.patch_size for t in towers}) != 1:
        raise ValueError("the towers' patch sizes differ, so their features can't be concatenated")
    return towers


def _parse_tower(timm_id: str, image_size: int, overrides: Mapping[str, Any], activation: str) -> TowerConfig:
    if timm_id not in KNOWN_TOWERS:
        raise ValueError(f"timm_model_ids: {timm_id!r} is not supported; known are {', '.join(KNOWN_TOWERS)}")
    unknown = [key for key in overrides if key not in TIMM_ARGUMENTS]
    if unknown:
        raise ValueError(
            f"timm_model_kwargs of {timm_id}: {', '.join(unknown)} not supported; known are {', '.join(TIMM_ARGUMENTS)}"
        )
    if activation not in ("gelu", "quick_gelu"):
        raise ValueError(f"timm_override_act_layers: {activation!r} is not supported; known are gelu, quick_gelu")
    fields = {TIMM_ARGUMENTS[key]: value for key, value in overrides.items()}
    for key, value in overrides.items():
        if key == "mlp_ratio":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST_IMAGE:
                raise ValueError(f"mlp_ratio of {timm_id} is {str(value)[:40]!r}, which must be a number above 0")
        else:
            fields[TIMM_ARGUMENTS[key]] = whole(value, f"{key} of {timm_id}", 0 if key == "reg_tokens" else 1)
    tower = replace(KNOWN_TOWERS[timm_id], image_size=image_size, activation=cast(Activation, activation), **fields)
    if tower.embed_dim % tower.num_heads:
        raise ValueError(f"embed_dim {tower.embed_dim} of {timm_id} is not a multiple of num_heads {tower.num_heads}")
    if image_size < tower.patch_size:
        raise ValueError(f"image size {image_size} is smaller than a patch of {tower.patch_size}")
    return tower


def _with_pixel_statistics(towers: tuple[TowerConfig, ...], path: Path) -> tuple[TowerConfig, ...]:
    """The towers with the means and stds of the checkpoint's own preprocessor, if it has them for each tower."""
    content = read_json(path) if path.is_file() else {}
    means, stds = content.get("means") or [], content.get("stds") or []
    if not (isinstance(means, list) and isinstance(stds, list)):
        raise ValueError(f"{path}: means and stds must be lists, three values for each tower: copy the file again")
    if not len(means) == len(stds) == len(towers):
        return towers
    return tuple(
        replace(tower, mean=_triple(mean, path, 0.0), std=_triple(std, path, 1e-6))
        for tower, mean, std in zip(towers, means, stds, strict=True)
    )


def _triple(values: Any, path: Path, low: float) -> tuple[float, float, float]:
    """Three fractions of the pixel range, each at least `low`."""
    if not isinstance(values, list) or len(values) != 3:
        raise ValueError(f"{path}: means and stds must be three values for each tower, got {values!r}")
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not low <= v <= LARGEST_PIXEL for v in values):
        raise ValueError(f"{path}: means and stds must be numeric, stds above 0, got {values!r}: copy the file again")
    red, green, blue = map(float, values)
    return red, green, blue
