"""Samples of a dataset in epochs: every one once an epoch, in an order that follows from the seed and the epoch.

    position    0 1 2 3 4 5 │ 6 7 8 9 10 11 │ …      counted over the whole run
    epoch            0      │       1       │ …      each with its own shuffled order
    iteration   ├─ 1 ─┼─ 2 ─┼── 3 ──┼ …              takes as many positions as it has groups, refilled ones included

The only state is `consumed_samples`, the count of groups whose results were reported: an iteration begins at that
position, so one that was interrupted takes the same samples again. A batch that is wanted before earlier ones are
reported begins after their groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from vlarl.config.schema import Config
from vlarl.envs.base import SuiteSpec
from vlarl.rollout.tasks import TaskSampler
from vlarl.types import IntArray, Task, TaskKey, Trajectory

_EPOCH_ORDER = 3  # keeps these seeds apart from those of rollout/tasks.py
CONSUMED = "consumed_samples"


def build_task_sampler(config: Config, spec: SuiteSpec) -> TaskSampler:
    """The sampler of a suite: a dataset is walked in epochs unless the curriculum chooses its tasks."""
    walks = spec.in_epochs and config.curriculum.mode == "uniform"
    return EpochSampler(config, spec) if walks else TaskSampler(config, spec)


class EpochSampler(TaskSampler):
    """Walks the samples of all tasks epoch by epoch."""

    def __init__(self, config: Config, spec: SuiteSpec) -> None:
        super().__init__(config, spec)
        self.consumed = 0  # samples, each one group, before the next iteration
        repeats = spec.repeats if self.states == spec.train_states else ()
        self._epochs = Epochs(self.seed, len(self.tasks) * len(self.states), tuple(repeats) * len(self.tasks))

    def sample(self, position: int) -> tuple[TaskKey, int]:
        """The task and the state at a position."""
        task, state = divmod(self._epochs.sample(position), len(self.states))
        return self.tasks[task], self.states[state]

    def get_batch(self, iteration: int, unreported: int = 0) -> list[Task]:
        """The tasks of the next samples, after those of groups that have not been reported yet."""
        return self._walk(iteration, range(self.num_groups), self.consumed + unreported)

    def report_results(self, trajectories: Iterable[Trajectory]) -> None:
        """Take an iteration's episodes into account: the next one begins after its last group."""
        episodes = list(trajectories)
        super().report_results(episodes)
        self.consumed += len({trajectory.group for trajectory in episodes})

    def state(self) -> dict[str, Any]:
        """The records of the tasks, and the position."""
        return super().state() | {CONSUMED: self.consumed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned."""
        super().restore(state)
        self.consumed = int(state.get(CONSUMED, 0))

    def metrics(self) -> dict[str, float]:
        """The curriculum's metrics, and how far the data has been used."""
        used = {
            "rollout/consumed_samples": float(self.consumed),
            "rollout/epoch": self.consumed / len(self._epochs.order(0)),
            "rollout/dropped_prompts": float(self.spec.num_dropped),
        }
        return super().metrics() | used

    def _groups(self, iteration: int, first: int, count: int) -> list[Task]:
        return self._walk(iteration, range(first, first + count), self.consumed)

    def _walk(self, iteration: int, groups: range, begin: int) -> list[Task]:
        """The tasks of these groups of an iteration whose first group has the sample at position `begin`."""
        return [
            self._task(iteration, group, member, *self.sample(begin + group))
            for group in groups
            for member in range(self.group_size)
        ]


class Epochs:
    """A pure function from a position to the index of a sample.

    >>> epochs = Epochs(seed=0, num_samples=3)
    >>> sorted(epochs.sample(position) for position in range(3, 6))
    [0, 1, 2]
    """

    def __init__(self, seed: int, num_samples: int, repeats: tuple[float, ...] = ()) -> None:
        """`repeats`: how often an epoch has each sample; empty: once. Of 0.5, every epoch has another half."""
        self.seed = seed
        self.repeats = np.array(repeats or (1.0,) * num_samples)
        self.order = lru_cache(maxsize=2)(self._order)

    def sample(self, position: int) -> int:
        """The sample at a position, counted from the start of training."""
        epoch, within = divmod(position, len(self.order(0)))
        return int(self.order(epoch)[within])

    def _order(self, epoch: int) -> IntArray:
        """The samples of an epoch in their order; all epochs have the same length."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, _EPOCH_ORDER, epoch]))
        whole = np.floor(self.repeats).astype(np.int64)
        counts = whole.copy()
        rest = self.repeats - whole
        for fraction in np.unique(rest[rest > 0]):  # samples of equal weight: some of them once more
            alike = np.flatnonzero(rest == fraction)
            more = max(round(float(fraction) * len(alike)), 1 if not whole[alike].any() else 0)
            counts[rng.permutation(alike)[:more]] += 1
        order: IntArray = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        return order
