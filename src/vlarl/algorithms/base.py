"""The algorithm contract: trajectories in, advantages out; then scores in, a loss out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlarl.config.schema import AlgorithmConfig
from vlarl.policies.base import Scores
from vlarl.types import FloatArray, TrainBatch, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Estimate:
    """A trajectory that goes into the update, and what its decisions were worth."""

    trajectory: Trajectory
    advantages: FloatArray  # [T] one for each decision
    returns: FloatArray | None = None  # [T] value targets; None without a critic
    values: FloatArray | None = None  # [T] the critic's values at rollout time; None without a critic


@dataclass(frozen=True)
class Denominators:
    """What the sums of a whole minibatch (all microbatches, all ranks) are divided by."""

    num_tokens: int  # executed action tokens
    num_decisions: int


@dataclass(frozen=True)
class Loss:
    """A microbatch's share of the loss, and the sums its metrics are made of."""

    total: torch.Tensor  # scalar, already divided by the minibatch's denominators
    token_sums: dict[str, torch.Tensor]  # metric -> sum over executed tokens
    decision_sums: dict[str, torch.Tensor]  # metric -> sum over decisions
    maxima: dict[str, torch.Tensor]


class Algorithm(ABC):
    """Turns groups of trajectories into estimates, and scores of a batch into a loss."""

    needs_critic: bool

    def __init__(self, config: AlgorithmConfig, temperature: float) -> None:
        self.config = config
        self.temperature = temperature

    @abstractmethod
    def estimate(self, groups: Sequence[TrajectoryGroup], values: Sequence[FloatArray] | None) -> list[Estimate]:
        """Advantages of the trajectories that teach something; `values` holds [T+1] for each trajectory in order."""

    @abstractmethod
    def loss(self, scores: Scores, batch: TrainBatch, over: Denominators, *, train_policy: bool) -> Loss:
        """The loss of one microbatch; `train_policy` is False while only the critic warms up."""
