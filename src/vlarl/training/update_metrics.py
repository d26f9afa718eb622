"""What a microbatch adds to the metrics of an update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vlarl.algorithms.base import Loss
from vlarl.algorithms.kl import k3
from vlarl.algorithms.losses import masked_sum
from vlarl.decisions import TrainBatch
from vlarl.observability.metrics import WeightedMeans
from vlarl.policies.base import Evaluation, TokenCount


@dataclass(frozen=True)
class MetricSums:
    """Sums with how many elements they are over, and maxima; plain floats, which ranks can send each other."""

    sums: dict[str, tuple[float, int]]
    maxima: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0  # the microbatch's part of the loss


@dataclass(frozen=True)
class PassSums:
    """The sums of one pass, still on its device: reading them waits for the pass.

    Of two tokens in one decision: `kinds` (loss, ""), (tokens, ""), (token, entropy), `values` 0.5, 2.0, 7.3.
    """

    kinds: tuple[tuple[str, str], ...]  # (loss | tokens | token | decision | maximum | error, metric) of each value
    values: torch.Tensor  # [M] float64
    num_decisions: int
    computed: TokenCount | None  # of the pass; None where all rows have as many tokens

    @classmethod
    def of(cls, loss: Loss, part: TrainBatch, evaluation: Evaluation) -> PassSums:
        """What a microbatch's loss and the policy's evaluation say."""
        found = {("loss", ""): loss.total, ("tokens", ""): part.mask.sum()}
        found |= {("token", name): total for name, total in loss.token_sums.items()}
        found |= {("decision", name): total for name, total in loss.decision_sums.items()}
        found |= {("maximum", "ratio_max"): loss.maxima["ratio_max"]}
        found |= {("error", "ratio_first_minibatch_error"): loss.maxima["ratio_error"]}
        if part.old_logprobs is None:  # no pass was made before this one
            kl, gap = _divergence(part, evaluation.logprobs.detach())
            found |= {("token", "engine_mismatch_kl"): kl, ("maximum", "engine_logprob_error"): gap}
        values = torch.stack([value.detach().double() for value in found.values()])
        return cls(tuple(found), values, len(part), evaluation.tokens)

    def read(self, first: bool) -> MetricSums:
        """The sums on the host; `first`: nothing has moved yet, so the ratio must be 1."""
        values = dict(zip(self.kinds, self.values.tolist(), strict=True))
        counts = {"token": int(values["tokens", ""]), "decision": self.num_decisions}
        sums = {name: (value, counts[kind]) for (kind, name), value in values.items() if kind in counts}
        if self.computed is not None:
            sums["packing_efficiency"] = (float(self.computed.read), self.computed.computed)
        shown = ("maximum", "error") if first else ("maximum",)
        maxima = {name: value for (kind, name), value in values.items() if kind in shown}
        return MetricSums(sums, maxima, values["loss", ""])

    def __getstate__(self) -> dict[str, Any]:
        """Other ranks have other devices."""
        return self.__dict__ | {"values": self.values.cpu()}


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


def mismatch(part: TrainBatch, learner_logprobs: torch.Tensor) -> MetricSums:
    """How far the engine's log-probs are from the learner's: KL(engine || learner)."""
    kl, gap = _divergence(part, learner_logprobs)
    return MetricSums({"engine_mismatch_kl": (float(kl), int(part.mask.sum()))}, {"engine_logprob_error": float(gap)})


def _divergence(part: TrainBatch, learner_logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of KL(engine || learner) over the elements, and the largest difference of log-probs."""
    engine_logprobs = part.decisions.engine_logprobs
    gap = torch.where(part.mask, learner_logprobs - engine_logprobs, 0.0)
    return masked_sum(k3(engine_logprobs, learner_logprobs), part.mask), gap.abs().max()


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
