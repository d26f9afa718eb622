"""From trajectories to batches: decisions as rows, and rows distributed over minibatches and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from vlarl.algorithms.advantages import executed
from vlarl.algorithms.aggregate import token_weights
from vlarl.algorithms.base import Estimate
from vlarl.decisions import TrainBatch
from vlarl.policies.base import Level
from vlarl.types import FloatArray, IntArray, Trajectory


def build_batch(trajectories: Sequence[Trajectory]) -> TrainBatch:
    """One row for each decision. Elements of steps that were not executed are masked."""
    transitions = [t for trajectory in trajectories for t in trajectory.transitions]
    inputs, decisions = [t.inputs for t in transitions], [t.decision for t in transitions]
    num_executed = torch.tensor([t.num_executed for t in transitions])
    lengths = torch.tensor([len(trajectory.transitions) for trajectory in trajectories])
    return TrainBatch(
        inputs=type(inputs[0]).cat(inputs),
        decisions=type(decisions[0]).cat(decisions).executed(num_executed),
        trajectory=torch.arange(len(trajectories)).repeat_interleave(lengths),
    )


def with_estimates(
    batch: TrainBatch, trajectories: Sequence[Trajectory], estimates: Sequence[Estimate], level: Level
) -> TrainBatch:
    """The batch with the advantages of its elements, and with value targets where there is a critic.

    `level` says what the columns of the estimates are of: decisions, environment steps or elements.
    """
    advantages, step = _rows([e.advantages for e in estimates]), batch.decisions.step
    if level == "step":
        advantages = advantages.gather(1, step)
    returns = [e.returns for e in estimates if e.returns is not None]
    if not returns:
        return replace(batch, advantages=_widened(advantages, step))
    counts = [executed(t, level, r.shape[1]) for t, r in zip(trajectories, returns, strict=True)]
    return replace(batch, advantages=_widened(advantages, step), returns=_rows(returns), value_mask=_rows(counts) > 0)


def _widened(advantages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[N, 1 or L] -> [N, L]."""
    return advantages.expand_as(like).contiguous()


def _rows(parts: Sequence[FloatArray] | Sequence[IntArray]) -> torch.Tensor:
    """[N, V] from arrays [T, V]."""
    return torch.from_numpy(np.concatenate(parts))


def minibatches(num_rows: int, num_minibatches: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Rows shuffled and distributed evenly; empty minibatches are left out."""
    shuffled = torch.randperm(num_rows, generator=generator)
    return [rows for rows in shuffled.tensor_split(num_minibatches) if len(rows)]


def whole_minibatches(trajectory: torch.Tensor, num_minibatches: int, generator: torch.Generator) -> list[torch.Tensor]:
    """The same for losses that look at whole trajectories: no minibatch gets a part of one.

    `trajectory` [N] says which one each row belongs to.
    """
    chosen = minibatches(int(trajectory.max()) + 1, num_minibatches, generator)
    return [torch.cat([torch.nonzero(trajectory == index).flatten() for index in indices]) for indices in chosen]


def microbatches(rows: torch.Tensor, size: int, prompt_lengths: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """A minibatch in pieces that fit into memory; prompts of like length together where their lengths [N] are given."""
    if prompt_lengths is not None:
        rows = rows[torch.argsort(prompt_lengths[rows], stable=True)]
    return torch.split(rows, size)


def weighted(batch: TrainBatch, rows: torch.Tensor, how: Literal["token_mean", "sequence_mean"]) -> TrainBatch:
    """The batch with what each token counts in the minibatch of these rows; tokens of other rows count nothing."""
    weights = torch.zeros(batch.mask.shape)
    weights[rows] = token_weights(batch.mask[rows], batch.trajectory[rows], how)
    return replace(batch, weights=weights)


def uncounted(batch: TrainBatch) -> TrainBatch:
    """The same decisions, of which nothing counts: the gradient of their loss is zero."""
    weights = None if batch.weights is None else torch.zeros_like(batch.weights)
    decisions = replace(batch.decisions, mask=torch.zeros_like(batch.mask))
    value_mask = None if batch.value_mask is None else torch.zeros_like(batch.value_mask)
    return replace(batch, decisions=decisions, value_mask=value_mask, weights=weights)


def value_weight(batch: TrainBatch, rows: torch.Tensor) -> float:
    """What each value of an executed step counts in the minibatch of these rows; 1 without a critic."""
    return 1.0 if batch.value_mask is None else 1 / max(int(batch.value_mask[rows].sum()), 1)


def mean_by_trajectory(x: torch.Tensor, mask: torch.Tensor, trajectory: torch.Tensor) -> torch.Tensor:
    """[N, T] -> [N] the mean over all marked elements of each row's trajectory."""
    sums, counts = (
        torch.zeros(int(trajectory.max()) + 1).index_add(0, trajectory, part.sum(dim=1))
        for part in (torch.where(mask, x, 0.0), mask.float())
    )
    return (sums / counts.clamp(min=1))[trajectory]
