"""A moving average of the policy's weights, often better and more stable than the newest ones."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from vlarl.policies.base import Policy
from vlarl.training.swap import swapped, trained_weights


class WeightAverage:
    """Float32 averages of all trained weights except the critic's.

    After n updates the weights of i updates ago have the factor beta^i, divided by the sum of these factors,
    (1 - beta^n) / (1 - beta): the average excludes the initial weights. They would be 99% of it after ten updates with
    beta 0.999. Before the first update the averages are the policy's own weights.
    """

    def __init__(self, policy: Policy, beta: float) -> None:
        self.policy = policy
        self.beta = beta
        self.num_updates = 0
        self.weights = {name: p.detach().float().clone() for name, p in trained_weights(policy).items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the policy's weights: average = (1 - rate) x average + rate x weight, with a rate that falls from 1 to
        1 - beta."""
        self.num_updates += 1
        rate = (1 - self.beta) / (1 - self.beta**self.num_updates)
        for name, parameter in trained_weights(self.policy).items():
            self.weights[name].mul_(1 - rate).add_(parameter, alpha=rate)

    @torch.no_grad()
    def begin(self) -> None:
        """Start the average at the policy's current weights."""
        self.num_updates = 0
        for name, parameter in trained_weights(self.policy).items():
            self.weights[name].copy_(parameter)

    def in_place(self) -> AbstractContextManager[None]:
        """Inside the block the policy's weights are the averages."""
        return swapped(self.policy, self.weights)
