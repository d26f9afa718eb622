"""Elementwise loss terms: the caller reduces them with its token weights."""

from __future__ import annotations

import math
from typing import Literal

import torch

RatioLevel = Literal["token", "action", "chunk", "sequence"]

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus and minus this before `exp`, as verl does: float32 overflows at 88, which the sum over
the tokens of a chunk reaches, and 0 * inf would backpropagate NaN. A ratio this large (0.36 a token in a chunk of 56)
is no longer a useful estimate: it has no gradient until the next update starts from 1 again."""


def probability_ratio(
    log_ratio: torch.Tensor, level: RatioLevel, step: torch.Tensor, sequence_log_ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """[N, T] the ratio of new to old probabilities, from log-ratios [N, T] that are 0 where masked.

    Beyond `LARGEST_LOG_RATIO` the ratio is constant and has no gradient; a sequence's keeps its tokens' own.

    The ratio is that of a token; of an action (the tokens of one environment step, by `step` [N, T]) or a chunk as a
    whole, shared by all of its tokens; or the length-normalised one of the whole trajectory (GSPO, arXiv:2507.18071),
    given as the mean log-ratio [N] of each row's trajectory. That one is GSPO-token: its value is the trajectory's, its
    gradient the token's, so that microbatches are independent of each other.
    """
    if level == "token":
        return bounded_exp(log_ratio)
    if level == "sequence":
        if sequence_log_ratio is None:
            raise ValueError("ratio_level 'sequence' needs the mean log-ratios of the trajectories in the batch")
        return bounded_exp(sequence_log_ratio)[:, None] * (log_ratio - log_ratio.detach()).exp()
    if level == "chunk":
        return bounded_exp(log_ratio.sum(dim=1, keepdim=True)).expand_as(log_ratio)
    return bounded_exp(step_sums(log_ratio, step))


def step_sums(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """[N, T] for each element the sum of x over all elements of its environment step, which `step` [N, T] says."""
    same = step[:, :, None] == step[:, None, :]  # a sum in a fixed order, unlike one by scatter_add on a GPU
    return torch.where(same, x[:, None, :], 0.0).sum(dim=2)


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """The ratio of a log-ratio, which is clamped to plus and minus `LARGEST_LOG_RATIO`; NaN stays NaN."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def clipped_policy_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate (arXiv:1707.06347) with two bounds (DAPO, arXiv:2503.14476); and where it clipped."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def dual_clip(loss: torch.Tensor, advantages: torch.Tensor, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds the surrogate of bad actions at `bound` times their advantage (arXiv:1912.09729); and where it did.

    PPO's clip does not bound the ratio of an action with a negative advantage from above.
    """
    limit = -advantages * bound
    beyond = (advantages < 0) & (loss > limit)
    return torch.where(beyond, limit, loss), beyond


def cpgd_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """CPGD's clipped policy gradient (arXiv:2505.12504), and where it was clipped.

    The gradient is that of the log-prob, not of a ratio that could explode; it is zero where the ratio exceeds the
    bound in the direction of the advantage. A ratio is never below 0, so `clip_low` of 1 or more has no effect.
    """
    low = old_logprobs + (math.log1p(-clip_low) if clip_low < 1 else -math.inf)
    high = old_logprobs + math.log1p(clip_high)
    bounded = torch.where(advantages > 0, torch.minimum(logprobs, high), torch.maximum(logprobs, low))
    return -advantages * bounded, (advantages != 0) & (bounded != logprobs)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange: float | None
) -> torch.Tensor:
    """Half the squared error; with a clip range, the worse of the prediction and its clipped version."""
    error = (values - returns) ** 2
    if cliprange is not None:
        clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
        error = torch.maximum(error, (clipped - returns) ** 2)
    return 0.5 * error


def high_entropy_tokens(entropies: torch.Tensor, mask: torch.Tensor, fraction: float) -> torch.Tensor:
    """[N, T] bool: the fraction of masked-in tokens with the highest entropy (arXiv:2506.01939), including all ties."""
    among = entropies[mask]
    if not len(among):
        return mask
    threshold = among.topk(math.ceil(fraction * len(among))).values[-1]
    return mask & (entropies >= threshold)


def masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the elements where the mask is True; the others may have any value, even NaN."""
    return torch.where(mask, x, 0.0).sum()
