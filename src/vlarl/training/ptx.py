"""PTX: a second dataset that the policy imitates while it is trained by RL.

    samples, in epochs ──► policy.process, policy.decisions_of ──► coef x mean of -log-prob, in every optimizer step

A sample is what the policy reads and what it should do: a prompt and a text, or an observation and actions. The order
follows from the run's seed; the position in it is the only state, and is saved with each checkpoint.
"""

from __future__ import annotations

from typing import Protocol

import torch

from vlarl.config.schema import PtxConfig
from vlarl.decisions import TrainBatch
from vlarl.policies.base import Policy
from vlarl.rollout.epochs import Epochs
from vlarl.rollout.tasks import derive_seed
from vlarl.types import Action, Observation

_ORDER = 8  # keeps the seed of this order apart from others


class ImitatedSamples(Protocol):
    """A dataset of what to imitate."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> tuple[Observation, Action]:
        """An observation, and what the policy should do there."""
        ...


class Ptx:
    """Batches of the second dataset, one for each optimizer step of the policy; the same on all ranks."""

    def __init__(self, samples: ImitatedSamples, policy: Policy, config: PtxConfig, seed: int) -> None:
        self.samples = samples
        self.policy = policy
        self.coef = config.coef
        self.batch_size = config.batch_size
        self.position = 0  # samples that were taken so far
        self._epochs = Epochs(derive_seed(seed, _ORDER), len(samples))

    def next_batch(self) -> TrainBatch:
        """The next samples as the policy reads them, and as decisions of the policy."""
        positions = range(self.position, self.position + self.batch_size)
        self.position = positions.stop
        return self.batch([self._epochs.sample(position) for position in positions])

    def batch(self, indices: list[int]) -> TrainBatch:
        """These samples, one row each."""
        pairs = [self.samples.sample(index) for index in indices]
        return TrainBatch(
            inputs=self.policy.process([observation for observation, _ in pairs]),
            decisions=self.policy.decisions_of([action for _, action in pairs]),
            trajectory=torch.arange(len(pairs)),
        )
