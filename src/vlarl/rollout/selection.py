"""Dynamic sampling (DAPO, arXiv:2503.14476): which groups are trained on, and how many fresh ones replace the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vlarl.config.schema import RolloutConfig
from vlarl.types import TrajectoryGroup


class GroupSelection:
    """The groups of one iteration. Unless refilling, oversampling or bounds are asked for, all of them are kept."""

    def __init__(self, config: RolloutConfig, has_lesson: Callable[[TrajectoryGroup], bool]) -> None:
        """`has_lesson` is the algorithm's word on a group: whether its episodes differ in what they earned."""
        self.config = config
        self.num_tried = 0  # groups that were rolled out, whatever came of them
        self._is_active = config.refill or config.oversample > 1 or config.accuracy_bounds is not None
        self._has_lesson = has_lesson
        self._useful: list[TrajectoryGroup] = []
        self._rounds = 0
        self._num_refilled = 0

    def add(self, groups: Sequence[TrajectoryGroup], num_tried: int) -> int:
        """Take in what `num_tried` groups left; the number of fresh groups to try next, 0 for none."""
        self.num_tried += num_tried
        self._useful += [group for group in groups if not self._is_active or self._has_learning_signal(group)]
        missing = self.config.num_groups - len(self._useful)
        if not self.config.refill or missing <= 0 or self._rounds == self.config.max_refills:
            return 0
        fresh = math.ceil(missing * self.config.oversample)
        self._rounds += 1
        self._num_refilled += fresh
        return fresh

    @property
    def kept(self) -> list[TrajectoryGroup]:
        """The groups to train on: the first `num_groups` that teach something."""
        return self._useful[: self.config.num_groups]

    def metrics(self) -> dict[str, float]:
        """How many groups were left out, and how many took their place.

        All other `rollout/` metrics are of all episodes, those of groups that were left out included.
        """
        if not self._is_active:
            return {}
        return {
            "rollout/groups_dropped": float(self.num_tried - len(self._useful)),
            "rollout/groups_surplus": float(len(self._useful) - len(self.kept)),
            "rollout/groups_refilled": float(self._num_refilled),
            "rollout/refill_rounds": float(self._rounds),
        }

    def _has_learning_signal(self, group: TrajectoryGroup) -> bool:
        low, high = self.config.accuracy_bounds or (-math.inf, math.inf)
        rate = sum(t.success for t in group.trajectories) / len(group.trajectories)
        return low < rate < high and self._has_lesson(group)
