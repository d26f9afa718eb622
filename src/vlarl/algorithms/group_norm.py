"""Group norm: GRPO's advantage (arXiv:2402.03300) as a reward for the last step, discounted back by `gamma`.

In a good episode a late action gets more credit than an early one. With `gamma: 1` this is GRPO.
"""

from __future__ import annotations

from collections.abc import Sequence

from vlarl.algorithms.advantages import discounted_back, group_relative, outcomes
from vlarl.algorithms.surrogate import CriticFree
from vlarl.types import FloatArray, TrajectoryGroup


class GroupNorm(CriticFree):
    """Normalised outcomes, discounted back."""

    compares_groups = True

    def advantages(self, groups: Sequence[TrajectoryGroup], values: Sequence[FloatArray] | None) -> list[FloatArray]:
        """Every step gets the episode's advantage within its group, discounted by the number of remaining steps."""
        config = self.config
        return [
            discounted_back(trajectory, float(advantage), config.gamma)
            for group in groups
            for trajectory, advantage in zip(
                group.trajectories,
                group_relative(outcomes(group, config.verifier_gamma), config.normalize_std),
                strict=True,
            )
        ]
