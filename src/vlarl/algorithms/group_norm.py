"""Group norm: GRPO's advantage (arXiv:2402.03300) as a reward for the last step, discounted back by `gamma`.

In a good episode a late action gets more credit than an early one. With `gamma: 1` this is GRPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from vlarl.algorithms.advantages import by_group, discounted_back, group_relative, outcomes
from vlarl.algorithms.surrogate import CriticFree
from vlarl.policies.base import Level
from vlarl.types import FloatArray, Trajectory


class GroupNorm(CriticFree):
    """Normalised outcomes, discounted back."""

    compares_groups = True

    @property
    def level(self) -> Level:
        """Each environment step has an advantage of its own."""
        return "step"

    def advantages(self, trajectories: Sequence[Trajectory], values: Sequence[FloatArray] | None) -> list[FloatArray]:
        """Every step gets the episode's advantage within its group, discounted by the steps that were still to come."""
        returns = outcomes(trajectories, self.config.verifier_gamma)
        relative = partial(group_relative, normalize_std=self.config.normalize_std)
        return [
            discounted_back(trajectory, float(advantage), self.config.gamma)
            for trajectory, advantage in zip(trajectories, by_group(trajectories, returns, relative), strict=True)
        ]
