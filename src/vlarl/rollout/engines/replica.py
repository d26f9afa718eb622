"""A torch engine with weights of its own, which a learner in another process sends (weights/receiver.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.policies.base import Policy
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.weights.buckets import unpacked
from vlarl.weights.receiver import WeightReceiver


class ReplicaEngine(WeightReceiver):
    """The torch engine on a copy of the policy, with the same adapters as the learner's."""

    def __init__(
        self, policy: Policy, device: torch.device, batch_size: int | None = None, cuda_graphs: bool = True
    ) -> None:
        self.policy = policy.eval()
        self._engine = TorchEngine(policy, device, batch_size, cuda_graphs)
        super().__init__({name: tuple(weight.shape) for name, weight in policy.engine_weights().items()})

    def generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """Sample a decision for each row, from its own seed whatever else is in the batch; temperature 0 is greedy."""
        self.check_usable()
        return self._engine.generate(inputs.joined(), sampling, seeds)

    def prepare_loading(self, names: set[str]) -> None:
        """Weights are copied in place: there is nothing to prepare."""

    @torch.no_grad()
    def load(self, message: dict[str, Any]) -> set[str]:
        """Copy the weights of a bucket into the policy's."""
        payload, names = self.bucket_of(message)
        weights = self.policy.engine_weights()  # found again: a first pass may have moved them (policies/lora.py)
        for name, tensor in unpacked(payload).items():
            weights[name].copy_(tensor)
        return names

    def finish_loading(self, version: int) -> None:
        """Bring up to date what is kept beside the weights."""
        self._engine.weights_changed(version)

    def drop_loading(self) -> None:
        """Weights that have been copied stay; `check_usable` keeps the engine from acting with them."""
