"""What a microbatch adds to the metrics of an update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from vlarl.algorithms.base import Loss
from vlarl.algorithms.kl import k3
from vlarl.algorithms.losses import masked_sum
from vlarl.observability.metrics import WeightedMeans
from vlarl.types import TrainBatch


@dataclass(frozen=True)
class Numbers:
    """Sums with how many things they are over, and maxima; plain numbers, which ranks can tell each other."""

    sums: dict[str, tuple[float, int]]
    maxima: dict[str, float] = field(default_factory=dict)


def note(metrics: WeightedMeans, numbers: Iterable[Numbers]) -> None:
    """Take the numbers of microbatches into the metrics, one after the other."""
    for one in numbers:
        for name, (total, weight) in one.sums.items():
            metrics.add(name, total, weight)
        for name, value in one.maxima.items():
            metrics.max(name, value)


def numbers_of(loss: Loss, part: TrainBatch, first: bool) -> Numbers:
    """What a microbatch's loss says; `first`: nothing has moved yet, so the ratio must be 1."""
    num_tokens, num_decisions = int(part.mask.sum()), len(part)
    sums = {name: (float(total), num_tokens) for name, total in loss.token_sums.items()}
    sums |= {name: (float(total), num_decisions) for name, total in loss.decision_sums.items()}
    maxima = {"ratio_max": float(loss.maxima["ratio_max"])}
    if first:
        maxima["ratio_first_minibatch_error"] = float(loss.maxima["ratio_error"])
    return Numbers(sums, maxima)


def mismatch(part: TrainBatch, learner_logprobs: torch.Tensor) -> Numbers:
    """How far the engine's log-probs (the batch's old ones, so far) are from the learner's."""
    gap = torch.where(part.mask, learner_logprobs - part.old_logprobs, 0.0)
    kl = masked_sum(k3(part.old_logprobs, learner_logprobs), part.mask)
    return Numbers(
        {"engine_mismatch_kl": (float(kl), int(part.mask.sum()))}, {"engine_logprob_error": float(gap.abs().max())}
    )


def importance_numbers(weights: torch.Tensor, mask: torch.Tensor, cap: float) -> Numbers:
    """The mean importance weight of the marked tokens, and how many of them are at the cap."""
    num_tokens, capped = int(mask.sum()), masked_sum((weights >= cap).float(), mask)
    return Numbers(
        {
            "importance_mean": (float(masked_sum(weights, mask)), num_tokens),
            "importance_capped": (float(capped), num_tokens),
        }
    )


def explained_variance(returns: torch.Tensor, values: torch.Tensor) -> float:
    """How much of the returns' variance the critic foresaw: 1 is all of it, 0 no more than their mean would."""
    variance = returns.var()
    return float("nan") if variance == 0 else float(1 - (returns - values).var() / variance)
