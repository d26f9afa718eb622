"""From estimates to batches: decisions as rows, and rows distributed over minibatches and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from vlarl.algorithms.aggregate import token_weights
from vlarl.algorithms.base import Estimate
from vlarl.policies.base import Policy
from vlarl.types import FloatArray, Observation, TrainBatch, Trajectory


def build_batch(estimates: Sequence[Estimate], policy: Policy) -> TrainBatch:
    """One row for each decision. Tokens of steps that were not executed are masked."""
    transitions = [t for e in estimates for t in e.trajectory.transitions]
    num_tokens = policy.chunk_length * policy.action_dim
    executed = torch.tensor([t.num_executed for t in transitions])
    token_ids = torch.from_numpy(np.stack([t.token_ids for t in transitions]))
    advantages = _rows([e.advantages for e in estimates])  # [N, V]
    lengths = torch.tensor([len(e.trajectory.transitions) for e in estimates])
    return TrainBatch(
        inputs=policy.process([t.observation for t in transitions]),
        token_ids=token_ids,
        places=token_ids - policy.codec.first_id,
        old_logprobs=torch.from_numpy(np.stack([t.engine_logprobs for t in transitions])),
        advantages=advantages.repeat_interleave(num_tokens // advantages.shape[1], dim=1),
        mask=torch.arange(num_tokens)[None, :] < executed[:, None] * policy.action_dim,
        trajectory=torch.arange(len(estimates)).repeat_interleave(lengths),
        returns=_column([e.returns for e in estimates]),
        old_values=_column([e.values for e in estimates]),
        ref_logprobs=_column([None if t.ref_logprobs is None else t.ref_logprobs[None] for t in transitions]),
    )


def _column(parts: Sequence[FloatArray | None]) -> torch.Tensor | None:
    """One array from those of all trajectories or decisions, None where they have none."""
    present = [part for part in parts if part is not None]
    return _rows(present) if present else None


def _rows(parts: Sequence[FloatArray]) -> torch.Tensor:
    """[N, V] from arrays [T, V], or [T] where V is 1."""
    return torch.from_numpy(np.concatenate([part.reshape(len(part), -1) for part in parts]))


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
    return replace(batch, mask=torch.zeros_like(batch.mask), weights=weights)


def value_weight(batch: TrainBatch, rows: torch.Tensor) -> float:
    """What each value of an executed step counts in the minibatch of these rows."""
    return 1 / max(int(batch.value_mask[rows].sum()), 1)


def mean_by_trajectory(x: torch.Tensor, mask: torch.Tensor, trajectory: torch.Tensor) -> torch.Tensor:
    """[N, T] -> [N] the mean over all marked elements of each row's trajectory."""
    sums, counts = (
        torch.zeros(int(trajectory.max()) + 1).index_add(0, trajectory, part.sum(dim=1))
        for part in (torch.where(mask, x, 0.0), mask.float())
    )
    return (sums / counts.clamp(min=1))[trajectory]


def observations_with_last(trajectory: Trajectory) -> list[Observation]:
    """All T+1 observations of a trajectory: one for each decision, and the last one, which no action follows."""
    return [t.observation for t in trajectory.transitions] + [trajectory.final_observation]
