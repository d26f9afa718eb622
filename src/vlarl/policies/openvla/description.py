"""Describes a checkpoint from its small files and the headers of the large ones, without reading any weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vlarl.policies import adapters
from vlarl.policies.family import AdapterFacts, Description, DtypeName, MemoryEstimate
from vlarl.policies.locate import BUILTIN, checkpoint_folder
from vlarl.policies.openvla.checkpoint import has_film_file, resolve_config
from vlarl.policies.openvla.components import has_component
from vlarl.policies.openvla.config import (
    NATIVE_KEY,
    DecoderName,
    OpenVLAConfig,
    language_config,
)
from vlarl.policies.openvla.limits import building, check_size
from vlarl.policies.openvla.memory import PROMPT_LENGTH, estimate_lora_update, estimate_rollout
from vlarl.policies.openvla.model import OpenVLAModel
from vlarl.policies.stored import adapter_facts, stored_weights
from vlarl.policies.weight_files import read_shapes

COMPONENTS = ("proprio_projector", "value_head", "action_head", "vision_backbone")  # files beside the model's own
NO_TOKENIZER = "missing: copy tokenizer.json of its base model into the folder, or no prompt can be encoded"
NO_STATISTICS = "missing: add dataset_statistics.json, or actions can't be converted to the robot's units"
HEADS = {"value_head": "critic", "action_head": "L1 regression"}


@dataclass(frozen=True)
class Statistics:
    """One key of a checkpoint's statistics."""

    key: str
    action_dim: int
    has_proprio: bool


@dataclass(frozen=True)
class LanguageModel:
    """The language model's kind and sizes."""

    kind: str
    num_layers: int
    width: int


@dataclass(frozen=True)
class OpenVLADescription(Description):
    """Everything that is known about an OpenVLA checkpoint without loading it."""

    config: OpenVLAConfig
    language: LanguageModel
    components: tuple[str, ...]  # those of COMPONENTS that are there
    has_tokenizer: bool
    statistics: tuple[Statistics, ...]

    @property
    def says_num_images(self) -> bool:
        """Whether the folder records how many images the model reads; the original OFT's don't."""
        return NATIVE_KEY in self.config.raw or self.config.decoder == "autoregressive"

    @property
    def heads(self) -> list[str]:
        """Heads that the checkpoint contains beside the model."""
        return [title for name, title in HEADS.items() if name in self.components]

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt that the estimates assume."""
        return PROMPT_LENGTH

    def model_facts(self, num_images: int | None) -> dict[str, str]:
        """Lines about decoder, inputs, heads and language model."""
        config, language = self.config, self.language
        images = f"{config.num_images} of {config.image_size} px, {config.towers[0].num_patches} tokens each"
        if num_images is None and not self.says_num_images:
            images += " (the folder does not say how many: add --num-images 2 for LIBERO's)"
        rows = f"{config.padded_vocab_size} rows, action ids {config.first_action_id}..{config.vocab_size - 1}"
        return {
            "decoder": f"{config.decoder}, {config.chunk_length} x {config.action_dim} action tokens per decision",
            "images": images,
            "proprio": f"{config.proprio_dim} values, one token" if config.use_proprio else "not read",
            "FiLM": "yes" if config.use_film else "no",
            "heads": ", ".join(self.heads) or "none",
            "vision": ", ".join(tower.timm_id for tower in config.towers),
            "language": f"{language.kind}, {language.num_layers} layers of width {language.width}, {rows}",
        }

    def file_facts(self) -> dict[str, list[str]]:
        """Lines about the tokenizer and the statistics."""
        width = max((len(entry.key) for entry in self.statistics), default=0)
        keys = [
            f"{key.key:<{width}}  {key.action_dim} action dims, {'with' if key.has_proprio else 'without'} proprio"
            for key in self.statistics
        ]
        return {"tokenizer": ["there" if self.has_tokenizer else NO_TOKENIZER], "unnorm_key": keys or [NO_STATISTICS]}

    def estimate_rollout(
        self, batch_size: int, dtype: DtypeName, quantize: Literal[4, 8] | None = None
    ) -> MemoryEstimate:
        """Memory for generating the actions of a batch of observations."""
        return estimate_rollout(self.config, batch_size, PROMPT_LENGTH, dtype, quantize)

    def estimate_lora_update(
        self,
        microbatch_size: int,
        dtype: DtypeName,
        rank: int,
        gradient_checkpointing: bool,
        quantize: Literal[4, 8] | None = None,
    ) -> MemoryEstimate:
        """Memory for one pass of an update of adapters."""
        settings = (dtype, rank, gradient_checkpointing, quantize)
        return estimate_lora_update(self.config, microbatch_size, PROMPT_LENGTH, *settings)

    def to_json(self) -> dict[str, Any]:
        """The whole description as JSON."""
        config = self.config
        return {
            "path": self.path,
            "kind": self.kind,
            "adapter": None if self.adapter is None else asdict(self.adapter),
            "decoder": config.decoder,
            "chunk_length": config.chunk_length,
            "action_dim": config.action_dim,
            "num_images": config.num_images,
            "image_size": config.image_size,
            "num_image_tokens": config.num_image_tokens,
            "proprio_dim": config.proprio_dim if config.use_proprio else None,
            "film": config.use_film,
            "heads": self.heads,
            "vision": [tower.timm_id for tower in config.towers],
            "language": asdict(self.language) | {"vocab_size": config.padded_vocab_size},
            "action_ids": [config.first_action_id, config.vocab_size - 1],
            "stored": asdict(self.stored),
            "problems": list(self.problems),
            "has_tokenizer": self.has_tokenizer,
            "unnorm_keys": [asdict(entry) for entry in self.statistics],
        }


def describe(
    path: str, folder: Path, decoder: DecoderName | None = None, num_images: int | None = None
) -> OpenVLADescription:
    """Describe the checkpoint or adapter that `path` names and `folder` holds, read as `load_policy` would read it."""
    adapter = adapter_facts(folder)
    base = folder if adapter is None else checkpoint_folder(adapter.base)
    if adapter is not None:
        adapters.check_base(folder, adapter.base, adapters.fingerprint(base))
    folders = (folder,) if adapter is None else (folder, base)
    found = tuple(name for name in COMPONENTS if any(has_component(each, name) for each in folders))
    config = resolve_config(folders, decoder, num_images=num_images)
    return OpenVLADescription(
        path=path,
        kind=_kind(path, config, found, adapter),
        adapter=adapter,
        config=config,
        language=_language(config),
        components=found,
        stored=stored_weights(base),
        problems=tuple(_problems(config, base, found)),
        has_tokenizer=any((each / "tokenizer.json").is_file() for each in folders),
        statistics=tuple(_statistics(key, entry) for key, entry in config.norm_stats.items()),
    )


def _kind(path: str, config: OpenVLAConfig, found: tuple[str, ...], adapter: AdapterFacts | None) -> str:
    if adapter is not None:
        return "LoRA adapter"
    if path in BUILTIN:
        return "built-in model"
    if NATIVE_KEY in config.raw:
        return "checkpoint of vlarl"
    oft = {"proprio_projector", "action_head", "vision_backbone"} & set(found)
    return "original OpenVLA-OFT" if oft else "original OpenVLA"


def _language(config: OpenVLAConfig) -> LanguageModel:
    whole = language_config(config.text)  # with the defaults that a file may leave out
    return LanguageModel(str(config.text["model_type"]), int(whole.num_hidden_layers), int(whole.hidden_size))


def _problems(config: OpenVLAConfig, folder: Path, found: tuple[str, ...]) -> list[str]:
    """How the stored tensors differ from those that the config requires."""
    stored = read_shapes(folder)
    try:
        check_size(config, folder, stored, towers=not has_film_file(folder))
    except ValueError as error:
        return [str(error)]
    with building(folder), torch.device("meta"):
        model = OpenVLAModel(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if has_film_file(folder):  # OFT's own file replaces the whole of it
        wanted, stored = ({n: s for n, s in of.items() if not n.startswith("vision_")} for of in (wanted, stored))
    differences = {
        "missing": [name for name in wanted if name not in stored],
        "unexpected": [name for name in stored if name not in wanted],
        "of another shape": [
            f"{name} {stored[name]} for {shape}"
            for name, shape in wanted.items()
            if name in stored and stored[name] != shape
        ],
    }
    problems = [f"{title} ({len(names)}): {', '.join(names)}" for title, names in differences.items() if names]
    if config.use_proprio and "proprio_projector" not in found:
        problems.append("no proprio_projector file, which its config requires")
    return problems


def _statistics(key: str, entry: Mapping[str, Any]) -> Statistics:
    return Statistics(key, _dim(entry, "action"), _dim(entry, "proprio") > 0)


def _dim(entry: Any, what: str) -> int:
    """Dimensions of one statistic; 0 if it is absent or malformed."""
    part = entry.get(what) if isinstance(entry, Mapping) else None
    values = part.get("q01") if isinstance(part, Mapping) else None
    return len(values) if isinstance(values, list) else 0
