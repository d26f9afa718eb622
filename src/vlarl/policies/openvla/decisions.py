"""What OpenVLA samples: the ids of action tokens, or OFT's regressed actions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlarl.decisions import Decisions, TensorRows


@dataclass(frozen=True)
class ActionTokens(TensorRows):
    """Action tokens: K*D vocabulary ids, all of them action ids."""

    ids: torch.Tensor  # [B, K*D] int64


@dataclass(frozen=True)
class RegressedActions(TensorRows):
    """Actions of OFT's regression head, which are not sampled."""

    actions: torch.Tensor  # [B, K, D] float32, normalised


def token_ids(decisions: Decisions) -> torch.Tensor:
    """[B, K*D] the ids that were sampled."""
    assert isinstance(decisions.sample, ActionTokens), "these are decisions of another policy"
    return decisions.sample.ids


def token_decisions(ids: torch.Tensor, logprobs: torch.Tensor, action_dim: int) -> Decisions:
    """Decisions of action tokens: D elements an environment step."""
    return _decisions(ActionTokens(ids), logprobs, action_dim)


def regressed_decisions(actions: torch.Tensor) -> Decisions:
    """Decisions of regressed actions [B, K, D], whose log-prob is 0, or NaN where they are not finite."""
    return _decisions(RegressedActions(actions), actions.flatten(1) * 0, actions.shape[2])


def _decisions(sample: TensorRows, logprobs: torch.Tensor, action_dim: int) -> Decisions:
    rows, num_elements = logprobs.shape
    step = torch.arange(num_elements, device=logprobs.device) // action_dim
    return Decisions(
        sample=sample,
        engine_logprobs=logprobs,
        mask=torch.ones_like(logprobs, dtype=torch.bool),
        step=step.expand(rows, -1),
        version=torch.zeros(rows, dtype=torch.int64, device=logprobs.device),
    )


def reconstruction_loss(
    logits: torch.Tensor, indices: torch.Tensor, bins: torch.Tensor, temperature: float
) -> torch.Tensor:
    """[B, T] squared distance of the action that the policy expects (its mean over the bins) to the one it took.

    `indices` [B, T] are action-bin indices, `bins` [num_bins] the normalised values of the bins.
    """
    bins = bins.to(logits.dtype)
    return ((logits / temperature).softmax(dim=-1) @ bins - bins[indices]) ** 2
