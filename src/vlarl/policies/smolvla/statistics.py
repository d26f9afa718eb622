"""The statistics that states and actions are normalised by: beside the pipelines, or among the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlarl.policies.smolvla.config import ACTION, STATE, SmolVLAConfig
from vlarl.policies.smolvla.pipelines import POSTPROCESSOR, PREPROCESSOR, normalizing_step, state_file
from vlarl.policies.weight_files import read_tensors
from vlarl.types import FloatArray

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
OLD_STATISTICS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")  # names that they begin with


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

    def tensors(self) -> dict[str, torch.Tensor]:
        """By feature and name, as the state file of a pipeline has them."""
        features = ((STATE, self.state), (ACTION, self.action))
        return {f"{feature}.{n}": t.contiguous() for feature, scaling in features for n, t in scaling.stats.items()}

    def action_array(self, normalized: torch.Tensor) -> FloatArray:
        """[…, D] in the robot's units."""
        array: FloatArray = self.action.unnormalize(normalized.float()).cpu().numpy().astype(np.float32)
        return array


def read_scalings(folder: Path, config: SmolVLAConfig, unread: Mapping[str, torch.Tensor]) -> Scalings:
    """From the folder's pipelines; older folders have none, and the statistics among the tensors in `unread`."""
    check_pipelines(folder, config)
    return Scalings(
        _of_pipeline(folder, PREPROCESSOR, STATE, "STATE", config, unread),
        _of_pipeline(folder, POSTPROCESSOR, ACTION, "ACTION", config, unread),
    )


def check_pipelines(folder: Path, config: SmolVLAConfig) -> None:
    """ValueError for normalised images, and for steps that are not known."""
    visual = _modes(config, normalizing_step(folder, PREPROCESSOR)).get("VISUAL", "IDENTITY")
    if visual != "IDENTITY":
        raise ValueError(
            f"the normalisation of VISUAL is {visual!r}, and only IDENTITY is supported: use a checkpoint whose images "
            "are not normalised"
        )
    normalizing_step(folder, POSTPROCESSOR)


def _of_pipeline(
    folder: Path, file: str, feature: str, kind: str, config: SmolVLAConfig, unread: Mapping[str, torch.Tensor]
) -> Scaling:
    """As the pipeline says, with its statistics or those of the buffers."""
    step = normalizing_step(folder, file)
    mode = _mode(_modes(config, step).get(kind))
    if step is None or not step.get("state_file"):
        prefix = OLD_BUFFERS[feature]
        return Scaling(
            mode, {n.removeprefix(prefix): t.float().clone() for n, t in unread.items() if n.startswith(prefix)}
        )
    stored = dict(read_tensors(folder / state_file(folder, step)))
    stats = {n.removeprefix(f"{feature}."): t.float().clone() for n, t in stored.items() if n.startswith(f"{feature}.")}
    return Scaling(mode, stats, float((step.get("config") or {}).get("eps", EPS)))


def _modes(config: SmolVLAConfig, step: Mapping[str, Any] | None) -> dict[str, Any]:
    """The kind of normalisation by the kind of feature: as the step says, else config.json."""
    settings = {} if step is None else step.get("config") or {}
    return {**config.norm_modes, **(settings.get("norm_map") or {})}


def _mode(mode: object) -> str:
    if mode is None:
        return "IDENTITY"
    if mode not in NEEDED:
        raise ValueError(f"normalisation by {mode!r} is not supported; supported are {', '.join(NEEDED)}")
    return str(mode)
