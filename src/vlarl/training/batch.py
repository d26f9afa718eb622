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
from vlarl.config.derive import microbatch_size
from vlarl.config.schema import OptimConfig
from vlarl.decisions import Decisions, PickedRows, TensorRows, TrainBatch
from vlarl.policies.base import Level
from vlarl.types import FloatArray, IntArray, Trajectory


def build_batch(trajectories: Sequence[Trajectory]) -> TrainBatch:
    """One row for each decision. Elements of steps that were not executed are masked."""
    transitions = [t for trajectory in trajectories for t in trajectory.transitions]
    decisions = PickedRows.of([t.decided for t in transitions]).joined()
    assert isinstance(decisions, Decisions)
    num_executed = torch.tensor([t.num_executed for t in transitions])
    lengths = torch.tensor([len(trajectory.transitions) for trajectory in trajectories])
    return TrainBatch(
        inputs=PickedRows.of([t.inputs for t in transitions if t.inputs is not None]),
        decisions=decisions.executed(num_executed),
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


def row_lengths(inputs: TensorRows, sample: TensorRows | None = None) -> torch.Tensor | None:
    """[N, 2] the tokens of each row's prompt and of what was sampled; None where all prompts are alike.

    What was sampled counts as 0 where all rows have as much of it.
    """
    prompts, sampled = inputs.lengths, None if sample is None else sample.lengths
    if prompts is None:
        return None
    return torch.stack([prompts, torch.zeros_like(prompts) if sampled is None else sampled], dim=1)


def microbatches(rows: torch.Tensor, optim: OptimConfig, lengths: torch.Tensor | None) -> Sequence[torch.Tensor]:
    """A minibatch in pieces that fit into memory: of so many rows, or of so many tokens by their lengths [N, 2]."""
    if optim.sort_by_length and lengths is not None:
        rows = rows[torch.argsort(lengths[rows].sum(dim=1), stable=True)]
    if optim.microbatch_tokens is None:
        return torch.split(rows, microbatch_size(optim))
    assert lengths is not None, "a budget of tokens needs rows that say how long they are"
    return torch.split(rows, sizes_within(lengths[rows], optim.microbatch_tokens, packed=optim.packing))


def sizes_within(lengths: torch.Tensor, budget: int, *, packed: bool) -> list[int]:
    """How many rows of these lengths [N, 2] each piece takes, in their order, so that it costs no more than the budget.

    Packed rows cost their own tokens; padded ones all cost as much as the longest prompt and the longest text of their
    piece. A row that is longer than the budget is a piece of its own.
    """
    sizes: list[int] = []
    prompts: list[int] = []  # of the piece that is being filled
    texts: list[int] = []
    for prompt, text in lengths.tolist():
        prompts.append(prompt)
        texts.append(text)
        cost = sum(prompts) + sum(texts) if packed else len(prompts) * (max(prompts) + max(texts))
        if len(prompts) > 1 and cost > budget:
            sizes.append(len(prompts) - 1)
            prompts, texts = [prompt], [text]
    return [*sizes, len(prompts)] if prompts else sizes


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
