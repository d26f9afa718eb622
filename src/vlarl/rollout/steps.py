"""All steps of an episode, as they are recorded for a dataset; and which episodes are recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from vlarl.envs.base import Demonstration
from vlarl.types import Action, ChunkOutcome, FloatArray, Observation, Task

Choice = Callable[[Task], bool]
"""Whether an episode is recorded: this follows from its task alone, so that a resumed run records the same ones."""


def no_episode(task: Task) -> bool:
    """None of them."""
    return False


@dataclass(frozen=True)
class RecordingPlan:
    """Which episodes are recorded."""

    video: Choice = no_episode  # large frames of every step
    steps: Choice = no_episode  # what the policy sees at every step


NO_RECORDING = RecordingPlan()


@dataclass
class EpisodeSteps:
    """What was seen before each step, which action was executed, and the environment's reward."""

    seen: list[Observation] = field(default_factory=list)  # on a cluster without their pixels, which are fetched later
    actions: list[FloatArray] = field(default_factory=list)  # [D] each
    rewards: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.actions)

    def add(self, before: Observation, chunk: Action, outcome: ChunkOutcome) -> None:
        """Add the steps of a chunk [K, D], decided at the observation `before`, that were executed; texts have none."""
        if isinstance(chunk, str) or outcome.error is not None:
            return
        seen = [replace(each, inputs=None) for each in (before, *outcome.passed)]
        if len(seen) != outcome.num_executed:
            raise ValueError(f"{outcome.num_executed} steps were executed, and {len(seen)} observations are there")
        self.seen += seen
        self.actions += list(chunk[: outcome.num_executed])
        self.rewards += outcome.rewards[: outcome.num_executed].tolist()

    def demonstration(self, task: Task, success: bool) -> Demonstration:
        """The episode with its pixels, from wherever they are."""
        seen = [observation.whole() for observation in self.seen]
        return Demonstration.of_steps(task, seen, [np.asarray(each) for each in self.actions], self.rewards, success)
