"""GRPO (arXiv:2402.03300): an episode is as good as it beat the others of its group. No critic.

A group that always succeeds or always fails says nothing about which actions were better: it is left out, and out of
the denominators too. The loss is averaged over executed tokens of the whole minibatch (DAPO, arXiv:2503.14476).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlarl.algorithms.advantages import discounted_return, group_relative, has_spread
from vlarl.algorithms.base import Algorithm, Denominators, Estimate, Loss
from vlarl.algorithms.surrogate import policy_loss
from vlarl.policies.base import Scores
from vlarl.types import FloatArray, TrainBatch, TrajectoryGroup


class GRPO(Algorithm):
    """Group-relative policy optimisation."""

    needs_critic = False

    def estimate(self, groups: Sequence[TrajectoryGroup], values: Sequence[FloatArray] | None) -> list[Estimate]:
        """Every decision of an episode gets the episode's advantage within its group."""
        estimates = []
        for group in groups:
            outcomes = [discounted_return(trajectory, self.config.verifier_gamma) for trajectory in group.trajectories]
            returns = np.array(outcomes, dtype=np.float32)
            if not has_spread(returns):
                continue
            advantages = group_relative(returns, self.config.normalize_std)
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
                spread_out = np.full(len(trajectory.transitions), advantage, dtype=np.float32)
                estimates.append(Estimate(trajectory, spread_out))
        return estimates

    def loss(self, scores: Scores, batch: TrainBatch, over: Denominators, *, train_policy: bool) -> Loss:
        """The clipped surrogate, and an entropy bonus where asked for."""
        return policy_loss(scores, batch, over, self.config, self.temperature)
