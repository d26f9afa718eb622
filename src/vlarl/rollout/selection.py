"""Dynamic sampling (DAPO, arXiv:2503.14476): which groups are trained on, and how many new ones replace the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vlarl.config.schema import RolloutConfig
from vlarl.types import Trajectory, group_members


class GroupRule:
    """Which groups are worth training on. Unless refilling, oversampling or bounds are configured, all of them are."""

    def __init__(self, config: RolloutConfig, has_learning_signal: Callable[[Sequence[Trajectory]], bool]) -> None:
        """`has_learning_signal` is the algorithm's: whether the members of a group differ in their returns."""
        self.is_active = config.refill or config.oversample > 1 or config.accuracy_bounds is not None
        self._bounds = config.accuracy_bounds or (-math.inf, math.inf)
        self._has_learning_signal = has_learning_signal

    def keeps(self, usable: Sequence[Trajectory]) -> bool:
        """Whether a group is kept of which these members neither crashed nor remained without a reward."""
        if not self.is_active:
            return True
        low, high = self._bounds
        rate = sum(t.success for t in usable) / max(len(usable), 1)
        return len(usable) > 0 and low < rate < high and self._has_learning_signal(usable)


class GroupSelection:
    """The groups of one iteration: the first `num_groups` that `GroupRule` keeps."""

    def __init__(self, config: RolloutConfig, rule: GroupRule) -> None:
        self.config = config
        self.num_tried = 0  # groups that were rolled out, whether kept or not
        self.kept: list[Trajectory] = []  # of the first `num_groups` groups that have a learning signal
        self._rule = rule
        self._num_useful = 0
        self._rounds = 0
        self._num_refilled = 0

    def add(self, trajectories: Sequence[Trajectory]) -> int:
        """Take in the episodes of whole groups, crashed ones among them; how many new groups to try next, 0 for none.

        An episode that crashed or could not be scored is left out of its group, which may become empty.
        """
        self.num_tried += len(trajectories) // self.config.group_size
        usable = [trajectory for trajectory in trajectories if trajectory.status == "ok"]
        for indices in group_members(usable):
            members = [usable[index] for index in indices]
            if not self._rule.keeps(members):
                continue
            self._num_useful += 1
            if self._num_useful <= self.config.num_groups:
                self.kept += members
        missing = self.config.num_groups - self._num_useful
        if not self.config.refill or missing <= 0 or self._rounds == self.config.max_refills:
            return 0
        num_new = math.ceil(missing * self.config.oversample)
        self._rounds += 1
        self._num_refilled += num_new
        return num_new

    def metrics(self) -> dict[str, float]:
        """How many groups were dropped, and how many replaced them.

        All other `rollout/` metrics are over all episodes, including those of dropped groups.
        """
        if not self._rule.is_active:
            return {}
        return {
            "rollout/groups_dropped": float(self.num_tried - self._num_useful),
            "rollout/groups_surplus": float(max(self._num_useful - self.config.num_groups, 0)),
            "rollout/groups_refilled": float(self._num_refilled),
            "rollout/refill_rounds": float(self._rounds),
        }
