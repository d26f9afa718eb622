"""Describes a SmolVLA checkpoint from its small files and the headers of the large ones, and estimates its memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vlarl.policies import adapters
from vlarl.policies.family import BYTES, FLOAT32, Description, DtypeName, MemoryEstimate, copied_bytes
from vlarl.policies.smolvla.checkpoint import COMPILED, UNUSED, backbone_folder
from vlarl.policies.smolvla.config import SmolVLAConfig, TextSizes, read_config
from vlarl.policies.smolvla.model import SmolVLAModel
from vlarl.policies.smolvla.pipelines import PREPROCESSOR
from vlarl.policies.smolvla.saving import MODEL
from vlarl.policies.smolvla.statistics import check_pipelines
from vlarl.policies.stored import adapter_facts, stored_weights
from vlarl.policies.weight_files import read_shapes

INSTRUCTION_TOKENS = 16  # that the estimates assume


@dataclass(frozen=True)
class SmolVLADescription(Description):
    """Everything that is known about a SmolVLA checkpoint without loading it."""

    config: SmolVLAConfig
    backbone_weights: int
    expert_weights: int
    expert_linears: tuple[tuple[int, int], ...]  # inputs and outputs of each linear layer of the expert
    has_pipelines: bool

    @property
    def prompt_length(self) -> int:
        """Tokens of an instruction that the estimates assume."""
        return INSTRUCTION_TOKENS

    @property
    def prefix_length(self) -> int:
        """Tokens of images, instruction and state."""
        return len(self.config.views) * self.config.tower.tokens + INSTRUCTION_TOKENS + 1

    def model_facts(self, num_images: int | None) -> dict[str, str]:
        """Lines about what the model reads and predicts, and its sizes."""
        config = self.config
        return {
            "model": f"SmolVLA, {len(config.views)} views, state of {config.state_dim}, actions of {config.action_dim}",
            "vision": f"{config.tower.layers} layers of width {config.tower.hidden}, {config.tower.image} pixels",
            "language": f"{config.text.layers} layers of width {config.text.hidden}, {config.vocab_size} tokens",
            "expert": f"{config.expert.layers} layers of width {config.expert.hidden}",
            "chunk": f"{config.chunk_size} actions, of which {config.n_action_steps} are executed",
            "denoising": f"{config.num_steps} steps",
        }

    def file_facts(self) -> dict[str, list[str]]:
        """Lines about statistics and backbone."""
        where = "in the pipelines" if self.has_pipelines else "among the weights, as older folders have them"
        return {"statistics": [where], "backbone": [self.config.backbone]}

    def estimate_rollout(
        self, batch_size: int, dtype: DtypeName, quantize: Literal[4, 8] | None = None
    ) -> MemoryEstimate:
        """Memory for denoising the actions of a batch of observations."""
        config = self.config
        cache = batch_size * self.prefix_length * config.text.layers * 2 * _keys(config.text) * BYTES[dtype]
        patches = batch_size * len(config.views) * (config.tower.image // config.tower.patch) ** 2
        seeing = patches * (5 * config.tower.hidden + config.tower.inner) * BYTES[dtype]
        reading = batch_size * self.prefix_length * (5 * config.text.hidden + 3 * config.text.inner) * BYTES[dtype]
        return MemoryEstimate(self._weights(dtype), activations=max(seeing, reading), cache=cache)

    def estimate_lora_update(
        self,
        microbatch_size: int,
        dtype: DtypeName,
        rank: int,
        gradient_checkpointing: bool,
        quantize: Literal[4, 8] | None = None,
    ) -> MemoryEstimate:
        """Memory for one pass of an update of adapters of the expert."""
        expert, reads = self.config.expert, self.estimate_rollout(microbatch_size, dtype, quantize)
        num_adapter_weights = sum(rank * (a + b) for a, b in self.expert_linears)
        tokens = microbatch_size * self.config.chunk_size
        saved = tokens * (6 * expert.hidden + 2 * _keys(expert) + 4 * expert.inner) * FLOAT32
        kept = saved * expert.layers
        if gradient_checkpointing:  # each layer's input, and all that the layer saves that is recomputed
            kept = saved + expert.layers * tokens * expert.hidden * FLOAT32
        copied = copied_bytes(dtype, quantize)
        return MemoryEstimate.of_lora(
            self._weights(dtype), num_adapter_weights, copied, kept + reads.activations + reads.cache
        )

    def _weights(self, dtype: DtypeName) -> int:
        return self.backbone_weights * BYTES[dtype] + self.expert_weights * FLOAT32

    def to_json(self) -> dict[str, Any]:
        """The whole description as JSON."""
        config = self.config
        return {
            "path": self.path,
            "kind": self.kind,
            "adapter": None if self.adapter is None else asdict(self.adapter),
            "views": list(config.views),
            "state_dim": config.state_dim,
            "action_dim": config.action_dim,
            "chunk_size": config.chunk_size,
            "n_action_steps": config.n_action_steps,
            "num_steps": config.num_steps,
            "vision": asdict(config.tower),
            "language": asdict(config.text) | {"vocab_size": config.vocab_size},
            "expert": asdict(config.expert),
            "stored": asdict(self.stored),
            "problems": list(self.problems),
        }


def describe(path: str, folder: Path) -> SmolVLADescription:
    """Describe the checkpoint or adapter that `path` names and `folder` holds."""
    adapter = adapter_facts(folder)
    base = folder if adapter is None else adapters.find_base(folder, None)[1]
    config = read_config(base, backbone_folder(base))
    with torch.device("meta"):
        model = SmolVLAModel(config)
    backbone = sum(p.numel() for p in model.backbone.parameters())
    linears = [m for m in model.expert.modules() if isinstance(m, torch.nn.Linear)]
    return SmolVLADescription(
        path=path,
        kind="LoRA adapter" if adapter else "SmolVLA",
        adapter=adapter,
        stored=stored_weights(base),
        problems=(*_problems(model, base), *_pipeline_problems(base, config)),
        config=config,
        backbone_weights=backbone,
        expert_weights=sum(p.numel() for p in model.parameters()) - backbone,
        expert_linears=tuple((m.in_features, m.out_features) for m in linears),
        has_pipelines=(base / PREPROCESSOR).is_file(),
    )


def _problems(model: SmolVLAModel, folder: Path) -> tuple[str, ...]:
    """Why the weights would not load, from the headers of their files."""
    wanted = {f"{MODEL}{name}": tuple(weight.shape) for name, weight in model.state_dict().items()}
    shapes = {name.replace(COMPILED, "."): shape for name, shape in read_shapes(folder).items()}
    found = {name: shape for name, shape in shapes.items() if not name.startswith(UNUSED)}
    titles = {
        "missing": wanted.keys() - found.keys(),
        "unexpected": found.keys() - wanted.keys(),
        "of another shape": {name for name in wanted.keys() & found.keys() if wanted[name] != found[name]},
    }
    return tuple(f"{title} ({len(names)}): {', '.join(sorted(names))}" for title, names in titles.items() if names)


def _pipeline_problems(folder: Path, config: SmolVLAConfig) -> tuple[str, ...]:
    """Why its pipelines would not be read."""
    try:
        check_pipelines(folder, config)
    except ValueError as error:
        return (str(error),)
    return ()


def _keys(sizes: TextSizes) -> int:
    return sizes.kv_heads * sizes.head_dim
