"""KL divergence between a policy and its reference: estimators from samples, and control of its coefficient."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from vlarl.algorithms.losses import LARGEST_LOG_RATIO
from vlarl.config.schema import KlConfig

LARGEST_ERROR = 0.2  # of the target: limits the effect of one outlier iteration on the coefficient
LARGEST_K3 = 10.0  # beyond it a token has no gradient


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token KL(policy || reference): unbiased, of high variance, often negative; for rewards."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio: slightly biased, never negative; its gradient is the KL's own."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, largest: float = LARGEST_K3) -> torch.Tensor:
    """Per-token KL(policy || reference): unbiased and never negative (http://joschu.net/blog/kl-approx.html).

    It grows exponentially where the reference gives a token a higher probability, so that one token could outweigh a
    minibatch: the log-ratio and the result are clamped, as in verl. An infinite `largest` never cuts the gradient.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=largest)


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


class FixedKl:
    """A constant coefficient."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, num_episodes: int) -> None:
        """Report an iteration's KL, which a fixed coefficient ignores."""


class AdaptiveKl(FixedKl):
    """A coefficient that rises while the KL is above its target and falls while it is below (arXiv:1909.08593)."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        super().__init__(coef)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_episodes: int) -> None:
        """Change by the relative error; over `horizon` episodes at a constant error, by a factor of about e to it.

        A KL that is not finite is ignored. The episodes of an update count as `horizon` at most, so that the
        coefficient stays positive.
        """
        if not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.coef *= 1 + error * min(num_episodes / self.horizon, 1.0)


def build_kl_controller(config: KlConfig) -> FixedKl:
    """The controller of the coefficient: adaptive with a target, else fixed. `coef` is its only state."""
    if config.target is None:
        return FixedKl(config.coef)
    return AdaptiveKl(config.coef, config.target, config.horizon)
