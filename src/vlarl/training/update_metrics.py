"""What a microbatch adds to the metrics of an update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from vlarl.algorithms.base import Loss
from vlarl.algorithms.kl import k3
from vlarl.algorithms.losses import masked_sum
from vlarl.decisions import TrainBatch
from vlarl.observability.metrics import WeightedMeans
from vlarl.policies.base import Evaluation


@dataclass(frozen=True)
class MetricSums:
    """Sums with how many elements they are over, and maxima; plain floats, which ranks can send each other."""

    sums: dict[str, tuple[float, int]]
    maxima: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0  # the microbatch's part of the loss

    def plus(self, other: MetricSums) -> MetricSums:
        """These and other metrics of the same microbatch."""
        return MetricSums(self.sums | other.sums, self.maxima | other.maxima, self.loss)


def note(metrics: WeightedMeans, sums: Iterable[MetricSums]) -> None:
    """Take the sums of microbatches into the metrics, one after the other."""
    for one in sums:
        for name, (total, weight) in one.sums.items():
            metrics.add(name, total, weight)
        for name, value in one.maxima.items():
            metrics.max(name, value)


def is_finite(sums: Iterable[MetricSums]) -> bool:
    """Whether loss and approximate KL of a minibatch are finite, by all its microbatches: all ranks know them all.

    Those of imitated samples have no KL.
    """
    return all(math.isfinite(one.loss) and math.isfinite(one.sums.get("approx_kl", (0.0, 0))[0]) for one in sums)


def mean_of(sums: Sequence[MetricSums], name: str) -> float:
    """The mean of one of the sums over a whole minibatch; 0 over nothing."""
    totals, counts = zip(*(one.sums[name] for one in sums if name in one.sums), strict=True)
    return float(sum(totals) / max(sum(counts), 1))


def metric_sums(loss: Loss, part: TrainBatch, first: bool) -> MetricSums:
    """What a microbatch's loss says; `first`: nothing has moved yet, so the ratio must be 1."""
    num_tokens, num_decisions = int(part.mask.sum()), len(part)
    sums = {name: (float(total), num_tokens) for name, total in loss.token_sums.items()}
    sums |= {name: (float(total), num_decisions) for name, total in loss.decision_sums.items()}
    maxima = {"ratio_max": float(loss.maxima["ratio_max"])}
    if first:
        maxima["ratio_first_minibatch_error"] = float(loss.maxima["ratio_error"])
    return MetricSums(sums, maxima, float(loss.total.detach()))


def mismatch(part: TrainBatch, learner_logprobs: torch.Tensor) -> MetricSums:
    """How far the engine's log-probs are from the learner's: KL(engine || learner)."""
    engine_logprobs = part.decisions.engine_logprobs
    gap = torch.where(part.mask, learner_logprobs - engine_logprobs, 0.0)
    kl = masked_sum(k3(engine_logprobs, learner_logprobs), part.mask)
    return MetricSums(
        {"engine_mismatch_kl": (float(kl), int(part.mask.sum()))}, {"engine_logprob_error": float(gap.abs().max())}
    )


def token_sums(evaluation: Evaluation) -> MetricSums:
    """Which fraction of the tokens that a pass computed was not padding; nothing where rows don't differ in length."""
    tokens = evaluation.tokens
    return MetricSums({} if tokens is None else {"packing_efficiency": (float(tokens.read), tokens.computed)})


def importance_sums(weights: torch.Tensor, mask: torch.Tensor, cap: float) -> MetricSums:
    """The mean importance weight of the marked tokens, and how many of them are at the cap."""
    num_tokens, capped = int(mask.sum()), masked_sum((weights >= cap).float(), mask)
    return MetricSums(
        {
            "importance_mean": (float(masked_sum(weights, mask)), num_tokens),
            "importance_capped": (float(capped), num_tokens),
        }
    )


def imitation_sums(logprobs: torch.Tensor, mask: torch.Tensor, loss: float) -> MetricSums:
    """The mean negative log-prob of imitated tokens, and the microbatch's part of the loss."""
    return MetricSums({"ptx_loss": (-float(masked_sum(logprobs, mask)), int(mask.sum()))}, loss=loss)


def critic_metrics(batch: TrainBatch) -> dict[str, float]:
    """What is known of the critic from the batch as a whole; nothing without one."""
    if batch.returns is None or batch.old_values is None or batch.value_mask is None:
        return {}
    counted = batch.value_mask
    return {"explained_variance": explained_variance(batch.returns[counted], batch.old_values[counted])}


def explained_variance(returns: torch.Tensor, values: torch.Tensor) -> float:
    """How much of the returns' variance the critic foresaw: 1 is all of it, 0 no more than their mean would.

    NaN where the returns don't vary, or there are fewer than two.
    """
    if len(returns) < 2 or (variance := returns.var()) == 0:
        return math.nan
    return float(1 - (returns - values).var() / variance)
