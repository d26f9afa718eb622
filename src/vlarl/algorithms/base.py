"""The algorithm contract: trajectories in, advantages out; then log-probs in, a loss out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from vlarl.algorithms.advantages import executed, outcomes, penalize, returns_differ, whiten
from vlarl.config.schema import AlgorithmConfig, KlConfig
from vlarl.decisions import TrainBatch
from vlarl.policies.base import Evaluation, Level
from vlarl.types import FloatArray, Trajectory, group_members

Factor = float | torch.Tensor
"""A factor in the loss: a number, or a scalar on the device, which a recorded pass reads again in each replay."""


@dataclass(frozen=True)
class AlgorithmContext:
    """What an algorithm knows of a run."""

    options: AlgorithmConfig
    kl: KlConfig
    temperature: float  # that the rollout samples with; all log-probs are taken at it


@dataclass(frozen=True)
class Estimate:
    """What the T decisions of a trajectory were worth.

    V is 1 where a decision has one value, the steps of a decision, or its elements (`Algorithm.level`); values of steps
    that were not executed are zero and mean nothing.
    """

    advantages: FloatArray  # [T, V]
    returns: FloatArray | None = None  # [T, V] value targets; None without a critic


@dataclass(frozen=True)
class Loss:
    """A microbatch's part of the loss, and the sums its metrics are made of."""

    total: torch.Tensor  # scalar; those of a minibatch's microbatches add up to its loss
    token_sums: dict[str, torch.Tensor]  # metric -> sum over executed elements
    decision_sums: dict[str, torch.Tensor]  # metric -> sum over decisions
    maxima: dict[str, torch.Tensor]


class Algorithm(ABC):
    """Turns trajectories into estimates, and the policy's evaluation of a batch into a loss."""

    needs_critic: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = False  # a group whose returns are equal has no learning signal for it
    normalization: ClassVar[Literal["none", "batch"]] = "none"  # what `normalize_advantages: auto` means
    lost_degrees: ClassVar[int] = 0  # of freedom, in the std that advantages are divided by

    def __init__(self, context: AlgorithmContext) -> None:
        self.context = context
        self.config = context.options
        self.temperature = context.temperature

    def with_learning_signal(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories of groups that have a learning signal, in their order."""
        if not self.compares_groups:
            return list(trajectories)
        members = ([trajectories[index] for index in indices] for indices in group_members(trajectories))
        return [trajectory for group in members if self.has_learning_signal(group) for trajectory in group]

    def has_learning_signal(self, members: Sequence[Trajectory]) -> bool:
        """Whether a group has a learning signal; not if its members are compared and none was better.

        One member that is left of several can't be compared, unlike the only member of a group of one.
        """
        if not self.compares_groups:
            return True
        is_remnant = len(members) == 1 and members[0].task.group_size > 1
        return not is_remnant and returns_differ(outcomes(members, self.config.verifier_gamma))

    def estimate(
        self,
        trajectories: Sequence[Trajectory],
        values: Sequence[FloatArray] | None,
        ref_kl: Sequence[FloatArray] | None = None,
        kl_coef: float = 0.0,
    ) -> list[Estimate]:
        """Advantages of trajectories that have a learning signal, members of a group following each other.

        For each trajectory in order, `values` holds the critic's [T+1, V], and `ref_kl` the KL [T, L] of the policy
        from its reference, zero where nothing was executed: with it, `kl_coef` times as much is subtracted from the
        rewards.
        """
        if not trajectories:
            return []
        rewarded = trajectories if ref_kl is None else penalize(trajectories, ref_kl, kl_coef)
        raw = self.advantages(rewarded, values)
        advantages = self._scaled(trajectories, raw)
        if values is None:
            return [Estimate(each) for each in advantages]
        return [
            Estimate(each, unscaled + value[:-1]) for each, unscaled, value in zip(advantages, raw, values, strict=True)
        ]

    @property
    def level(self) -> Level:
        """What the columns of advantages are of: decisions, environment steps or elements."""
        return "chunk"

    @classmethod
    def discount(cls, options: AlgorithmConfig) -> float:
        """What a reward loses for each environment step that it comes later."""
        return options.verifier_gamma

    @abstractmethod
    def advantages(self, trajectories: Sequence[Trajectory], values: Sequence[FloatArray] | None) -> list[FloatArray]:
        """[T, V] for each trajectory in order, before normalisation over the batch."""

    @abstractmethod
    def loss(
        self, evaluation: Evaluation, batch: TrainBatch, *, value_weight: Factor, kl_coef: Factor, train_policy: bool
    ) -> Loss:
        """The loss of one microbatch: `value_weight` is what a value counts in its minibatch, as `batch.weights` is for
        tokens; `train_policy` is False while only the critic warms up."""

    def _scaled(self, trajectories: Sequence[Trajectory], raw: list[FloatArray]) -> list[FloatArray]:
        """Advantages as the options want them: normalised over the executed steps of the whole batch, and bounded."""
        how, bound = self.config.normalize_advantages, self.config.advantage_clamp
        how = self.normalization if how == "auto" else how
        if how != "none":
            counts = [executed(t, self.level, a.shape[1]) for t, a in zip(trajectories, raw, strict=True)]
            raw = whiten(raw, counts, shift_mean=how == "batch", lost_degrees=self.lost_degrees)
        return raw if bound is None else [a.clip(-bound, bound) for a in raw]
