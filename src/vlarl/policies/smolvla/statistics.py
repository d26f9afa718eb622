"""The statistics that states and actions are normalised by: beside the pipelines, or among the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from vlarl.policies.checkpoint_json import read_json
from vlarl.policies.smolvla.config import ACTION, STATE, SmolVLAConfig
from vlarl.policies.weight_files import read_tensors
from vlarl.types import FloatArray

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
NORMALIZER, UNNORMALIZER = "normalizer_processor", "unnormalizer_processor"
EPS = 1e-8  # the original's, where a file does not say
NEEDED = {  # by the kind of normalisation: the statistics that are read
    "IDENTITY": (),
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
OLD_BUFFERS = {  # of folders without pipelines: where their weight file has the statistics
    STATE: "normalize_inputs.buffer_observation_state.",
    ACTION: "unnormalize_outputs.buffer_action.",
}


@dataclass(frozen=True)
class Scaling:
    """How one feature is normalised."""

    mode: str  # a key of NEEDED
    stats: Mapping[str, torch.Tensor] = field(default_factory=dict)  # float32, by name
    eps: float = EPS

    def normalize(self, values: torch.Tensor) -> torch.Tensor:
        """From the robot's units."""
        if self.mode == "IDENTITY":
            return values
        first, second = (self.stats[name].to(values.device) for name in NEEDED[self.mode])
        if self.mode == "MEAN_STD":
            return (values - first) / (second + self.eps)
        return 2.0 * (values - first) / self._range(first, second) - 1.0

    def unnormalize(self, values: torch.Tensor) -> torch.Tensor:
        """To the robot's units."""
        if self.mode == "IDENTITY":
            return values
        first, second = (self.stats[name].to(values.device) for name in NEEDED[self.mode])
        if self.mode == "MEAN_STD":
            return values * second + first
        return (values + 1.0) / 2.0 * self._range(first, second) + first

    def _range(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return torch.where(high == low, self.eps, high - low)

    def problem(self, dimensions: int) -> str:
        """Why it can't be used, or nothing."""
        for name in NEEDED[self.mode]:
            if name not in self.stats:
                return f"they have no {name}"
            if tuple(self.stats[name].shape) != (dimensions,):
                return f"{name} has the shape {list(self.stats[name].shape)} for {dimensions} dimensions"
            if not self.stats[name].isfinite().all():
                return f"{name} holds values that are not finite"
        return ""


@dataclass(frozen=True)
class Scalings:
    """How states and actions are normalised."""

    state: Scaling
    action: Scaling

    def problem(self, config: SmolVLAConfig) -> str:
        """Why they can't be used, or nothing."""
        for title, scaling, size in (
            ("state", self.state, config.state_dim),
            ("action", self.action, config.action_dim),
        ):
            if reason := scaling.problem(size):
                return f"the statistics of the {title} can't be used: {reason}"
        return ""

    def buffers(self) -> dict[str, torch.Tensor]:
        """As an older folder has them among its weights."""
        features = ((STATE, self.state), (ACTION, self.action))
        return {f"{OLD_BUFFERS[feature]}{n}": t for feature, scaling in features for n, t in scaling.stats.items()}

    def action_array(self, normalized: torch.Tensor) -> FloatArray:
        """[…, D] in the robot's units."""
        array: FloatArray = self.action.unnormalize(normalized.float()).cpu().numpy().astype(np.float32)
        return array


def stored_statistics(files: Mapping[str, bytes], scalings: Scalings) -> dict[str, bytes]:
    """The state files of a folder's pipelines with these statistics; none for a folder without pipelines."""
    content = {
        f"{feature}.{name}": tensor.contiguous()
        for feature, scaling in ((STATE, scalings.state), (ACTION, scalings.action))
        for name, tensor in scaling.stats.items()
    }
    return {name: save(content) for name in files if name.endswith(".safetensors")}


def read_scalings(folder: Path, config: SmolVLAConfig, unread: Mapping[str, torch.Tensor]) -> Scalings:
    """From the folder's pipelines; older folders have none, and the statistics among the tensors in `unread`."""
    return Scalings(
        _of_pipeline(folder, PREPROCESSOR, NORMALIZER, STATE, "STATE", config)
        or _of_buffers(config, STATE, "STATE", unread),
        _of_pipeline(folder, POSTPROCESSOR, UNNORMALIZER, ACTION, "ACTION", config)
        or _of_buffers(config, ACTION, "ACTION", unread),
    )


def pipeline_files(folder: Path) -> list[str]:
    """The pipelines of a folder and their state files, by name."""
    names = []
    for name in (PREPROCESSOR, POSTPROCESSOR):
        if (folder / name).is_file():
            names += [name, *(_state_file(folder, step) for step in _steps(folder, name) if step.get("state_file"))]
    return names


def _steps(folder: Path, name: str) -> list[dict[str, Any]]:
    steps = read_json(folder / name).get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ValueError(f"{folder / name} has no list of steps: copy or download it again")
    return steps


def _state_file(folder: Path, step: Mapping[str, Any]) -> str:
    name = str(step["state_file"])
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError(f"{folder}: a pipeline names the state file {name[:80]!r}, which is not a file beside it")
    return name


def _of_pipeline(
    folder: Path, file: str, registry_name: str, feature: str, kind: str, config: SmolVLAConfig
) -> Scaling | None:
    if not (folder / file).is_file():
        return None
    step = next((step for step in _steps(folder, file) if step.get("registry_name") == registry_name), None)
    if step is None or not step.get("state_file"):
        return None
    settings = step.get("config") or {}
    modes = {**config.norm_modes, **(settings.get("norm_map") or {})}
    stored = dict(read_tensors(folder / _state_file(folder, step)))
    stats = {n.removeprefix(f"{feature}."): t.float().clone() for n, t in stored.items() if n.startswith(f"{feature}.")}
    return Scaling(_mode(modes.get(kind)), stats, float(settings.get("eps", EPS)))


def _of_buffers(config: SmolVLAConfig, feature: str, kind: str, unread: Mapping[str, torch.Tensor]) -> Scaling:
    prefix = OLD_BUFFERS[feature]
    stats = {n.removeprefix(prefix): t.float().clone() for n, t in unread.items() if n.startswith(prefix)}
    return Scaling(_mode(config.norm_modes.get(kind)), stats)


def _mode(mode: object) -> str:
    if mode is None:
        return "IDENTITY"
    if mode not in NEEDED:
        raise ValueError(f"normalisation by {mode!r} is not supported; supported are {', '.join(NEEDED)}")
    return str(mode)
