"""The REINFORCE family (Williams 1992): plain returns, returns minus a baseline, or normalised over the batch.

All three keep PPO's clip, without which several steps on one batch would diverge. None needs groups or a critic.
"""

from __future__ import annotations

from collections.abc import Sequence

from vlarl.algorithms.advantages import against_mean, outcomes, returns_to_go, throughout
from vlarl.algorithms.surrogate import CriticFree
from vlarl.config.schema import AlgorithmConfig
from vlarl.policies.base import Level
from vlarl.types import FloatArray, Trajectory, group_members


class Reinforce(CriticFree):
    """REINFORCE: the discounted rewards to go."""

    @classmethod
    def discount(cls, options: AlgorithmConfig) -> float:
        """Rewards are discounted by `gamma`."""
        return options.gamma

    @property
    def level(self) -> Level:
        """Each environment step has an advantage of its own."""
        return "step"

    def advantages(self, trajectories: Sequence[Trajectory], values: Sequence[FloatArray] | None) -> list[FloatArray]:
        """Every step gets the rewards from it on, discounted by `gamma`."""
        return [returns_to_go(trajectory, self.config.gamma) for trajectory in trajectories]


class ReinforcePlusPlus(Reinforce):
    """REINFORCE++ (arXiv:2501.03262): returns normalised over the whole batch, a KL penalty in the rewards."""

    normalization = "batch"
    lost_degrees = 1


class ReinforceBaseline(CriticFree):
    """REINFORCE++ with baseline (arXiv:2501.03262): returns minus their mean, normalised over the whole batch."""

    compares_groups = True
    normalization = "batch"
    lost_degrees = 1

    def advantages(self, trajectories: Sequence[Trajectory], values: Sequence[FloatArray] | None) -> list[FloatArray]:
        """Every decision gets its episode's return minus the mean of its group; of the batch, in groups of one."""
        returns = outcomes(trajectories, self.config.verifier_gamma)
        return throughout(trajectories, against_mean(returns, group_members(trajectories)))
