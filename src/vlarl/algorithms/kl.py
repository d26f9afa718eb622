"""Estimators of the KL divergence from samples (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

import torch


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token KL(policy || reference): unbiased and never negative."""
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio
