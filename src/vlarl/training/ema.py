"""A moving average of the policy's weights, which is often better than the newest ones and moves less."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from vlarl.policies.base import Policy
from vlarl.training.swap import swapped, trained_weights


class WeightAverage:
    """Float32 averages of all weights that are trained, the critic's aside."""

    def __init__(self, policy: Policy, beta: float) -> None:
        self.policy = policy
        self.beta = beta
        self.weights = {name: p.detach().float().clone() for name, p in trained_weights(policy).items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the policy's weights in: average = beta x average + (1 - beta) x weight."""
        for name, parameter in trained_weights(self.policy).items():
            self.weights[name].mul_(self.beta).add_(parameter, alpha=1 - self.beta)

    def in_place(self) -> AbstractContextManager[None]:
        """Inside the block the policy has the averages for its weights."""
        return swapped(self.policy, self.weights)
