"""Loss terms, element by element: reductions belong to the caller, who knows the global denominators."""

from __future__ import annotations

import torch


def clipped_policy_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate (arXiv:1707.06347), bounds apart (DAPO, arXiv:2503.14476); and where it was clipped."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange: float | None
) -> torch.Tensor:
    """Half the squared error; with a clip range, the worse of the prediction and its clipped version."""
    error = (values - returns) ** 2
    if cliprange is not None:
        clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
        error = torch.maximum(error, (clipped - returns) ** 2)
    return 0.5 * error


def masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the marked elements; what is not marked may be anything, even not finite."""
    return torch.where(mask, x, 0.0).sum()
