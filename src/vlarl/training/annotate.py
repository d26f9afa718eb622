"""Annotations: log-probs and values of a batch before its first optimizer step.

    policy       log-probs, entropies, values of a value head     one pass
    critic       values of a network of its own                    one pass
    reference    log-probs                                         one pass, with its own weights

No pass is made for what is not needed. With one epoch and one minibatch, the ratio is 1 by construction: it begins at
the log-probs of the gradient's own pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vlarl.algorithms.kl import ESTIMATORS
from vlarl.config.schema import Config
from vlarl.decisions import PickedRows, TensorRows, TrainBatch
from vlarl.policies.base import Policy
from vlarl.training.importance import corrects
from vlarl.types import FloatArray, Observation, Trajectory


@dataclass(frozen=True)
class Needs:
    """Which annotations of the policy and the critic an update needs; a reference, where there is one, is needed."""

    logprobs: bool
    values: bool

    @classmethod
    def of(cls, config: Config, num_minibatches: int, needs_critic: bool) -> Needs:
        """`num_minibatches` are those of all epochs."""
        algorithm, kl = config.algorithm, config.kl
        moves = num_minibatches > 1 or corrects(config) or algorithm.entropy_top_fraction < 1
        in_reward = kl.coef > 0 and kl.place == "reward"
        logprobs = (algorithm.old_logprobs == "learner" and moves) or in_reward
        return cls(logprobs, needs_critic)


@dataclass(frozen=True)
class Annotations(TensorRows):
    """Columns of a batch, on the host; None for what was not needed."""

    logprobs: torch.Tensor | None = None  # [N, L]
    entropy: torch.Tensor | None = None  # [N, L]
    values: torch.Tensor | None = None  # [N, V]
    ref_logprobs: torch.Tensor | None = None  # [N, L]
    last_values: torch.Tensor | None = None  # [M, V] of the last observations; not one of the batch's rows

    def onto(self, batch: TrainBatch, config: Config) -> TrainBatch:
        """The batch with these columns, and the log-probs where its ratios begin."""
        from_engine = config.algorithm.old_logprobs == "engine"
        return replace(
            batch,
            learner_logprobs=self.logprobs,
            entropy=self.entropy,
            ref_logprobs=self.ref_logprobs,
            old_values=self.values,
            old_logprobs=batch.decisions.engine_logprobs if from_engine else self.logprobs,
        )


def last_observations(trajectories: Sequence[Trajectory]) -> list[int]:
    """Indices of the trajectories whose last observation has a value: the time limit cut them off."""
    return [index for index, trajectory in enumerate(trajectories) if not trajectory.terminated]


def last_inputs(policy: Policy, seen: Sequence[Observation]) -> TensorRows:
    """Last observations as the policy reads them: where that was done beside the environments, their rows."""
    rows = [observation.inputs for observation in seen if observation.inputs is not None]
    return PickedRows.of(rows) if rows else policy.process(seen)


def values_by_trajectory(
    batch: TrainBatch, trajectories: Sequence[Trajectory], last_values: torch.Tensor | None
) -> list[FloatArray]:
    """The critic's values [T+1, V] of each trajectory; the last one is 0 where nothing follows."""
    assert batch.old_values is not None, "annotate the batch first"
    ends = np.zeros((len(trajectories), batch.old_values.shape[1]), dtype=np.float32)
    if last_values is not None:
        ends[last_observations(trajectories), 0] = last_values[:, 0].numpy()  # GAE reads the first one alone
    rows = by_trajectory(batch.old_values, trajectories)
    return [np.concatenate([values, end[None]]) for values, end in zip(rows, ends, strict=True)]


def reference_kl(batch: TrainBatch, trajectories: Sequence[Trajectory], estimator: str) -> list[FloatArray]:
    """[T, L] of each trajectory: how far the policy is from its reference at each element; zero where not executed.

    Both log-probs are the learner's: the engine's would add its rounding to the penalty.
    """
    assert batch.learner_logprobs is not None and batch.ref_logprobs is not None, "annotate the batch first"
    kl = ESTIMATORS[estimator](batch.learner_logprobs, batch.ref_logprobs)
    return by_trajectory(torch.where(batch.mask, kl, 0.0), trajectories)


def by_trajectory(column: torch.Tensor, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
    """The rows [T, …] of each trajectory."""
    ends = np.cumsum([len(trajectory.transitions) for trajectory in trajectories])
    return np.split(column.numpy(), ends[:-1])
