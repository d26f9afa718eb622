"""PPO (arXiv:1707.06347) with a critic: advantages by GAE over decisions, and a clipped value loss.

A decision is a chunk of K actions: its reward is the discounted sum over the executed steps, and the discount to the
next decision is gamma to the number of executed steps. With K = 1 this is the textbook estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlarl.algorithms.advantages import chunk_rewards, gae
from vlarl.algorithms.base import Algorithm, Denominators, Estimate, Loss
from vlarl.algorithms.losses import value_loss
from vlarl.algorithms.surrogate import policy_loss
from vlarl.policies.base import Scores
from vlarl.types import FloatArray, TrainBatch, TrajectoryGroup


class PPO(Algorithm):
    """Proximal policy optimisation with generalised advantage estimation."""

    needs_critic = True

    def estimate(self, groups: Sequence[TrajectoryGroup], values: Sequence[FloatArray] | None) -> list[Estimate]:
        """GAE for every trajectory, then advantages normalised over the executed tokens of the whole batch."""
        trajectories = [t for group in groups for t in group.trajectories]
        if values is None:
            raise ValueError("PPO needs the values of the trajectories")
        if not trajectories:
            return []
        raw = []
        for trajectory, value in zip(trajectories, values, strict=True):
            rewards, discounts = chunk_rewards(trajectory, self.config.gamma)
            raw.append(gae(rewards, discounts, value, trajectory.terminated, self.config.gae_lambda))
        weights = np.concatenate([[t.num_executed for t in trajectory.transitions] for trajectory in trajectories])
        everything = np.concatenate(raw)
        mean = np.average(everything, weights=weights)
        std = np.sqrt(np.average((everything - mean) ** 2, weights=weights))
        return [
            Estimate(trajectory, ((a - mean) / (std + 1e-8)).astype(np.float32), a + value[:-1], value[:-1])
            for trajectory, a, value in zip(trajectories, raw, values, strict=True)
        ]

    def loss(self, scores: Scores, batch: TrainBatch, over: Denominators, *, train_policy: bool) -> Loss:
        """The clipped surrogate plus the value loss; while the critic warms up, the value loss alone."""
        if scores.values is None or batch.old_values is None or batch.returns is None:
            raise ValueError("PPO needs a policy with a value head")
        policy = policy_loss(scores, batch, over, self.config, self.temperature)
        critic = value_loss(scores.values, batch.old_values, batch.returns, self.config.cliprange_value).sum()
        total = self.config.vf_coef * critic / over.num_decisions
        if train_policy:
            total = total + policy.total
        return Loss(total, policy.token_sums, {"value_loss": critic.detach()}, policy.maxima)
