"""Dynamic sampling (DAPO, arXiv:2503.14476): which groups are trained on, and how many new ones replace the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vlarl.config.schema import RolloutConfig
from vlarl.types import TrajectoryGroup


class GroupSelection:
    """The groups of one iteration. Without refilling, oversampling or bounds, all of them are kept."""

    def __init__(self, config: RolloutConfig, has_learning_signal: Callable[[TrajectoryGroup], bool]) -> None:
        """`has_learning_signal` is the algorithm's: whether the returns of a group's episodes differ."""
        self.config = config
        self.num_tried = 0  # groups that were rolled out, whether kept or not
        self._is_active = config.refill or config.oversample > 1 or config.accuracy_bounds is not None
        self._has_learning_signal = has_learning_signal
        self._useful: list[TrajectoryGroup] = []
        self._rounds = 0
        self._num_refilled = 0

    def add(self, groups: Sequence[TrajectoryGroup], num_tried: int) -> int:
        """Add what is left of `num_tried` groups; returns how many new groups to roll out next, 0 for none."""
        self.num_tried += num_tried
        self._useful += [group for group in groups if not self._is_active or self._is_useful(group)]
        missing = self.config.num_groups - len(self._useful)
        if not self.config.refill or missing <= 0 or self._rounds == self.config.max_refills:
            return 0
        num_new = math.ceil(missing * self.config.oversample)
        self._rounds += 1
        self._num_refilled += num_new
        return num_new

    @property
    def kept(self) -> list[TrajectoryGroup]:
        """The groups to train on: the first `num_groups` that have a learning signal."""
        return self._useful[: self.config.num_groups]

    def metrics(self) -> dict[str, float]:
        """How many groups were dropped, and how many replaced them.

        All other `rollout/` metrics are over all episodes, including those of dropped groups.
        """
        if not self._is_active:
            return {}
        return {
            "rollout/groups_dropped": float(self.num_tried - len(self._useful)),
            "rollout/groups_surplus": float(len(self._useful) - len(self.kept)),
            "rollout/groups_refilled": float(self._num_refilled),
            "rollout/refill_rounds": float(self._rounds),
        }

    def _is_useful(self, group: TrajectoryGroup) -> bool:
        low, high = self.config.accuracy_bounds or (-math.inf, math.inf)
        rate = sum(t.success for t in group.trajectories) / len(group.trajectories)
        return low < rate < high and self._has_learning_signal(group)
