"""What the loop needs of a learner and of its checkpoints, in this process or on the ranks of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from vlarl.config.schema import Config
from vlarl.decisions import TensorRows, TrainBatch
from vlarl.policies.base import Policy
from vlarl.training.annotate import Annotations
from vlarl.training.state import TrainerState
from vlarl.types import UpdateResult
from vlarl.weights.sync import Average


class Trainer(Protocol):
    """Turns batches into better weights: `Learner` in this process, `LearnerGroup` on a cluster."""

    policy: Policy
    config: Config

    @property
    def version(self) -> int:
        """Updates so far."""
        ...

    @property
    def kl_coef(self) -> float:
        """The weight of the KL from the reference, as it is now."""
        ...

    @property
    def average(self) -> Average | None:
        """The moving average of the weights, where one is kept."""
        ...

    def update(
        self, batch: TrainBatch, iteration: int, on_step: Callable[[int, int], None], iterations: int | None = None
    ) -> UpdateResult:
        """Train on a batch of decisions; `on_step` is called with how many optimizer steps are done, of how many.

        `iterations` are those of the whole run, as far as is known by now: what schedules follow.
        """
        ...

    def annotate(self, batch: TrainBatch, iteration: int, last: TensorRows | None = None) -> Annotations:
        """Log-probs and values of a batch before its first step; `last` are the inputs of last observations."""
        ...


class Store(Protocol):
    """The checkpoints of a run."""

    def save(self, name: str, learner: Any, state: TrainerState) -> Path:
        """Write a checkpoint that training can resume from."""
        ...

    def save_policy(self, name: str, policy: Policy, metadata: dict[str, Any]) -> Path:
        """Write the policy alone, with a note of what it is."""
        ...

    def restore(self, learner: Any, checkpoint: Path) -> TrainerState:
        """Put the learner back where the checkpoint was written."""
        ...
