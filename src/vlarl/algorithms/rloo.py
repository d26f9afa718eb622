"""RLOO (arXiv:2402.14740): the mean of the others of its group is an episode's unbiased baseline. No critic."""

from __future__ import annotations

from collections.abc import Sequence

from vlarl.algorithms.advantages import by_group, leave_one_out, outcomes, throughout
from vlarl.algorithms.surrogate import CriticFree
from vlarl.types import FloatArray, Trajectory


class RLOO(CriticFree):
    """REINFORCE leave-one-out."""

    compares_groups = True

    def advantages(self, trajectories: Sequence[Trajectory], values: Sequence[FloatArray] | None) -> list[FloatArray]:
        """Every decision of an episode gets the episode's return minus the mean of the others."""
        returns = outcomes(trajectories, self.config.verifier_gamma)
        return throughout(trajectories, by_group(trajectories, returns, leave_one_out))
