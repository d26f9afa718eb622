"""From estimates to batches: decisions as rows, and rows dealt out to minibatches and microbatches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlarl.algorithms.base import Denominators, Estimate
from vlarl.policies.base import Policy
from vlarl.types import Observation, TrainBatch, Trajectory


def build_batch(estimates: Sequence[Estimate], policy: Policy) -> TrainBatch:
    """One row for each decision. Tokens of steps that were not executed are masked."""
    transitions = [t for e in estimates for t in e.trajectory.transitions]
    num_tokens = policy.chunk_length * policy.action_dim
    executed = torch.tensor([t.num_executed for t in transitions])
    token_ids = torch.from_numpy(np.stack([t.token_ids for t in transitions]))
    advantages = torch.from_numpy(np.concatenate([e.advantages for e in estimates]))
    return TrainBatch(
        inputs=policy.process([t.observation for t in transitions]),
        token_ids=token_ids,
        places=token_ids - policy.codec.first_id,
        old_logprobs=torch.from_numpy(np.stack([t.engine_logprobs for t in transitions])),
        advantages=advantages[:, None].expand(-1, num_tokens).contiguous(),
        mask=torch.arange(num_tokens)[None, :] < executed[:, None] * policy.action_dim,
        returns=_column([e.returns for e in estimates]),
        old_values=_column([e.values for e in estimates]),
    )


def _column(parts: Sequence[np.ndarray | None]) -> torch.Tensor | None:
    """[N] from the arrays of all trajectories, None where there is no critic."""
    present = [part for part in parts if part is not None]
    return torch.from_numpy(np.concatenate(present)) if present else None


def minibatches(num_rows: int, num_minibatches: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Rows shuffled and dealt out evenly; an empty share is left out."""
    shuffled = torch.randperm(num_rows, generator=generator)
    return [share for share in shuffled.tensor_split(num_minibatches) if len(share)]


def microbatches(rows: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """A minibatch in pieces that fit into memory."""
    return torch.split(rows, size)


def denominators(batch: TrainBatch, rows: torch.Tensor) -> Denominators:
    """What the sums of a minibatch are divided by; never zero."""
    return Denominators(max(int(batch.mask[rows].sum()), 1), max(len(rows), 1))


def observations_with_last(trajectory: Trajectory) -> list[Observation]:
    """All T+1 observations of a trajectory: one for each decision, and the last one, which nobody acted on."""
    return [t.observation for t in trajectory.transitions] + [trajectory.final_observation]
