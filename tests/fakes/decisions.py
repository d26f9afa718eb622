"""Decisions of action tokens without a policy, and updates as the loop makes them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from vlarl.decisions import Batch, Decisions, Row, TensorRows, TrainBatch
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.training.learner import Learner
from vlarl.types import FloatArray, IntArray, Observation, Transition, UpdateResult


@dataclass(frozen=True)
class NoInputs(TensorRows):
    """Inputs of a policy that reads nothing."""

    nothing: torch.Tensor  # [B]


def no_inputs(count: int = 1) -> NoInputs:
    return NoInputs(torch.zeros(count))


def split(batch: Batch) -> list[Batch]:
    """Each row as a batch of one."""
    return [Row(batch, index).alone() for index in range(len(batch))]


def rows_of(batch: Batch) -> list[Row[Batch]]:
    """Each row."""
    return [Row(batch, index) for index in range(len(batch))]


def decision(ids: IntArray, logprobs: FloatArray, action_dim: int = 7, version: int = 0) -> Decisions:
    """One row of action tokens [K*D]."""
    row = token_decisions(torch.from_numpy(ids)[None], torch.from_numpy(logprobs)[None], action_dim)
    return row.of_version(version)


def transition(
    observation: Observation,
    ids: IntArray,
    logprobs: FloatArray,
    rewards: FloatArray,
    num_executed: int,
    inputs: TensorRows | None = None,
) -> Transition:
    """A decision of action tokens [K*D] and its outcome."""
    row = decision(ids, logprobs, len(ids) // len(rewards))
    read = no_inputs() if inputs is None else inputs
    return Transition(observation, Row(read, 0), Row(row, 0), rewards, num_executed)


def taken_ids(t: Transition) -> IntArray:
    """[K*D] the action tokens of a decision."""
    ids: IntArray = t.decision.sample.ids[0].numpy()  # type: ignore[attr-defined]
    return ids


def engine_logprobs(t: Transition) -> FloatArray:
    """[K*D] the log-probs that the engine found."""
    logprobs: FloatArray = t.decision.engine_logprobs[0].numpy()
    return logprobs


def with_engine_logprobs(t: Transition, logprobs: FloatArray) -> Transition:
    """The same decision, which the engine found as likely as given."""
    row = replace(t.decision, engine_logprobs=torch.from_numpy(np.asarray(logprobs, np.float32))[None])
    return replace(t, decided=Row(row, 0))


def nothing(done: int, planned: int) -> None:
    pass


def annotated(learner: Learner, batch: TrainBatch, iteration: int) -> TrainBatch:
    """The batch as the loop gives it to the update; values that it has already are kept."""
    found = learner.annotate(batch, iteration)
    if batch.old_values is not None:
        found = replace(found, values=batch.old_values)
    return found.onto(batch, learner.config)


def annotated_update(
    learner: Learner,
    batch: TrainBatch,
    iteration: int,
    on_step: Callable[[int, int], None] = nothing,
    iterations: int | None = None,
) -> UpdateResult:
    """Annotate a batch and train on it."""
    return learner.update(annotated(learner, batch, iteration), iteration, on_step, iterations)
