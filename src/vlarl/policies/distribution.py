"""Categorical distributions, such as those over action bins, in float32, for engine and learner.

Sampling and scoring use the same functions, so that their log-probs agree.
"""

from __future__ import annotations

import torch


def token_logprobs(logits: torch.Tensor, indices: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs [B, T] of indices [B, T] under logits [B, T, N] at a temperature."""
    scaled = _scaled(logits, temperature)
    chosen = scaled.gather(-1, indices.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(dim=-1)


def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy [B, T] in nats at a temperature."""
    logprobs = _scaled(logits, temperature).log_softmax(dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def sample(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor) -> torch.Tensor:
    """Indices [B, T] by the inverse CDF of the given uniforms [B, T] in [0, 1).

    A token depends on its own logits and its own uniform only, so a row gets the same sample in any batch.
    """
    probs = _scaled(logits, temperature).softmax(dim=-1)
    cdf = probs.cumsum(dim=-1)
    # The float32 sum may differ slightly from 1. Scaled by it, a uniform always falls inside the support; `right` makes
    # a uniform of exactly 0 skip leading bins of zero probability.
    target = (uniforms.float() * cdf[..., -1]).unsqueeze(-1)
    indices = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    # u*total may round up to total: then take the last bin with a nonzero probability.
    last = (cdf < cdf[..., -1:]).sum(dim=-1)
    return torch.minimum(indices, last)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely action-bin indices [B, T]."""
    return logits.argmax(dim=-1)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be positive: for the most likely token use greedy()")
    return logits.float() / temperature
