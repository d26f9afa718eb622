"""The weight of each token in the loss of its minibatch."""

from __future__ import annotations

from typing import Literal

import torch

Aggregate = Literal["token_mean", "sequence_mean"]


def token_weights(mask: torch.Tensor, trajectory: torch.Tensor, how: Aggregate) -> torch.Tensor:
    """[N, T] float32 weights of a minibatch's tokens, from executed tokens [N, T] and the trajectory [N] of each row.

    They sum to 1, or are all 0 if nothing was executed. With `token_mean` every executed token has the same weight
    (DAPO, arXiv:2503.14476); with `sequence_mean` every trajectory does, divided equally over its tokens (GRPO,
    arXiv:2402.03300). They are computed over the whole minibatch, so its split into microbatches affects memory only.
    """
    executed = mask.float()
    if how == "token_mean":
        return executed / executed.sum().clamp(min=1.0)
    members, row_member = torch.unique(trajectory, return_inverse=True)
    counts = torch.zeros(len(members), device=mask.device).index_add(0, row_member, executed.sum(dim=1))
    weights = 1.0 / (counts.clamp(min=1.0) * (counts > 0).sum().clamp(min=1))
    return executed * weights[row_member, None]
