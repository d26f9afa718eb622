"""The engine for OpenVLA-OFT's regression head: continuous actions, for evaluation only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from vlarl.errors import UsageError
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.rollout.engines.base import not_finite
from vlarl.types import ActionTokens, PolicyInput


class RegressionEngine:
    """Acts with the regression head. Its action for an observation is fixed: no log-probs, and nothing to sample."""

    def __init__(self, policy: OpenVLAPolicy, device: torch.device) -> None:
        self.policy = policy
        self.device = device
        self.version = 0

    @torch.no_grad()
    def generate(self, inputs: PolicyInput, temperature: float, seeds: Sequence[int]) -> ActionTokens:
        """The head's actions, and the tokens nearest to them, each with log-prob 0."""
        if temperature != 0:
            raise UsageError(f"temperature {temperature} with the regression head, which does not sample: use 0.")
        actions = self.policy.regress(inputs.to(self.device)).cpu()
        if not actions.isfinite().all():
            raise not_finite(self.version)
        ids = torch.from_numpy(self.policy.codec.encode(actions.numpy()))
        return ActionTokens(ids, torch.zeros(ids.shape), self.version, actions)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Refused: RL does not train this head."""
        raise UsageError(f"weights of version {version} can't be given to the regression head: RL does not train it.")
