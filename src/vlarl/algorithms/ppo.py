"""PPO (arXiv:1707.06347) with a critic: advantages by GAE over chunks, steps or tokens, and a clipped value loss.

A decision is a chunk of K actions. As one long step, its reward is the discounted sum over the executed steps, and the
discount to the next decision is gamma to the number of executed steps. With K = 1 this is the textbook estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

from vlarl.algorithms.advantages import trajectory_gae
from vlarl.algorithms.base import Algorithm, Factor, Loss
from vlarl.algorithms.losses import value_loss
from vlarl.algorithms.surrogate import policy_loss
from vlarl.config.schema import AlgorithmConfig
from vlarl.decisions import TrainBatch
from vlarl.policies.base import Evaluation, Level
from vlarl.types import FloatArray, Trajectory


class PPO(Algorithm):
    """Proximal policy optimisation with generalised advantage estimation."""

    needs_critic = True
    normalization = "batch"

    @classmethod
    def discount(cls, options: AlgorithmConfig) -> float:
        """Rewards are discounted by `gamma`."""
        return options.gamma

    @property
    def level(self) -> Level:
        """As configured: each decision, step or element has an advantage."""
        return self.config.gae_level

    def advantages(self, trajectories: Sequence[Trajectory], values: Sequence[FloatArray] | None) -> list[FloatArray]:
        """GAE for every trajectory."""
        if values is None:
            raise ValueError("PPO needs the values of the trajectories")
        config = self.config
        return [
            trajectory_gae(trajectory, value, config.gae_level, config.gamma, config.gae_lambda)
            for trajectory, value in zip(trajectories, values, strict=True)
        ]

    def loss(
        self, evaluation: Evaluation, batch: TrainBatch, *, value_weight: Factor, kl_coef: Factor, train_policy: bool
    ) -> Loss:
        """The policy's loss plus the value loss; while the critic warms up, the value loss alone."""
        if evaluation.values is None or batch.old_values is None or batch.returns is None or batch.value_mask is None:
            raise ValueError("PPO needs a policy with a value head")
        policy = policy_loss(evaluation, batch, self.context, kl_coef)
        counts = batch.value_mask  # steps that never ran have no value target; zeroed first, like masked elements
        values, old_values, returns = (
            x.masked_fill(~counts, 0.0) for x in (evaluation.values, batch.old_values, batch.returns)
        )
        critic = value_loss(values, old_values, returns, self.config.cliprange_value)
        total = self.config.vf_coef * (critic.sum() * value_weight)
        if train_policy:
            total = total + policy.total
        by_decision = (critic.detach().sum(dim=1) / counts.sum(dim=1).clamp(min=1)).sum()
        return Loss(total, policy.token_sums, {"value_loss": by_decision}, policy.maxima)
