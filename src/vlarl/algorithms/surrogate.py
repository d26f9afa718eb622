"""The policy loss, shared by all algorithms; and the base class of those without a critic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vlarl.algorithms.base import Algorithm, AlgorithmContext, Factor, Loss
from vlarl.algorithms.kl import ESTIMATORS, k3
from vlarl.algorithms.losses import (
    bounded_exp,
    clipped_policy_loss,
    cpgd_loss,
    dual_clip,
    masked_sum,
    probability_ratio,
)
from vlarl.config.derive import PolicyLoss, clip_range, kl_estimator, policy_loss_of
from vlarl.decisions import TrainBatch
from vlarl.policies.base import Evaluation


@dataclass(frozen=True)
class Surrogate:
    """What the policy gradient is taken of, element by element."""

    loss: torch.Tensor  # [N, L]
    ratio: torch.Tensor  # [N, L] of the policy that learns to the one that acted
    events: dict[str, torch.Tensor]  # metric -> [N, L] bool, where it happened


Objective = Callable[[torch.Tensor, torch.Tensor, TrainBatch, AlgorithmContext], Surrogate]
"""(log-probs [N, L], old ones, batch, context) -> surrogate."""


def masked_advantages(batch: TrainBatch) -> torch.Tensor:
    """[N, L] the advantages, 0 where masked."""
    if batch.advantages is None:
        raise ValueError("the batch has no advantages: give it the algorithm's estimates first")
    return torch.where(batch.mask, batch.advantages, 0.0)


def clipped_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: TrainBatch, context: AlgorithmContext
) -> Surrogate:
    """PPO's clipped surrogate, of the ratio at the configured level.

    Tokens that are not selected contribute to the value of a ratio that several tokens share, not to its gradient.
    """
    options, advantages = context.options, masked_advantages(batch)
    if batch.selected is not None:
        logprobs = torch.where(batch.selected, logprobs, logprobs.detach())
    ratio = probability_ratio(
        logprobs - old_logprobs, options.ratio_level, batch.decisions.step, batch.sequence_log_ratio
    )
    loss, clipped = clipped_policy_loss(ratio, advantages, *clip_range(options))
    events = {"clipfrac": clipped}
    if options.dual_clip is not None:
        loss, events["dual_clipfrac"] = dual_clip(loss, advantages, options.dual_clip)
    return Surrogate(loss, ratio, events)


def clipped_gradient(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: TrainBatch, context: AlgorithmContext
) -> Surrogate:
    """CPGD's surrogate (arXiv:2505.12504): the gradient of clipped log-probs instead of the ratio's, and
    `policy_drift_coef` times the KL from the policy that acted.

    A ratio that explodes can't make the gradient explode, and the drift term keeps the policy near the one that acted.
    """
    options, advantages = context.options, masked_advantages(batch)
    loss, clipped = cpgd_loss(logprobs, old_logprobs, advantages, *clip_range(options))
    if options.policy_drift_coef > 0:
        loss = loss + options.policy_drift_coef * k3(old_logprobs, logprobs, largest=math.inf)
    return Surrogate(loss, bounded_exp(logprobs - old_logprobs), {"clipfrac": clipped})


OBJECTIVES: dict[PolicyLoss, Objective] = {"clip": clipped_ratio, "cpg": clipped_gradient}


def policy_loss(evaluation: Evaluation, batch: TrainBatch, context: AlgorithmContext, kl_coef: Factor) -> Loss:
    """The surrogate minus the entropy bonus, plus the optional terms: over executed elements, by their weights."""
    options, mask, weights = context.options, batch.mask, batch.weights
    if weights is None:
        raise ValueError("the batch has no weights of its elements: cut it into minibatches first")
    logprobs, entropy = (torch.where(mask, x, 0.0) for x in (evaluation.logprobs, evaluation.entropy))
    unmoved = logprobs.detach()
    old_logprobs = unmoved if batch.old_logprobs is None else torch.where(mask, batch.old_logprobs, 0.0)
    surrogate = OBJECTIVES[policy_loss_of(options)](logprobs, old_logprobs, batch, context)
    total = (weights * surrogate.loss).sum() - options.entropy_coef * (weights * entropy).sum()
    per_token = {"policy_loss": surrogate.loss, "entropy": entropy, "approx_kl": k3(old_logprobs, unmoved)}
    per_token |= {name: event.float() for name, event in surrogate.events.items()}
    if batch.ref_logprobs is not None:
        ref_logprobs = torch.where(mask, batch.ref_logprobs, unmoved)
        per_token["kl_ref"] = kl = ESTIMATORS[kl_estimator(context.kl)](logprobs, ref_logprobs)
        if context.kl.place == "loss":
            total = total + kl_coef * (weights * kl).sum()
    if options.action_reconstruction_coef > 0:
        if "action_reconstruction" not in evaluation.extras:
            raise ValueError("algorithm.action_reconstruction_coef > 0 needs a policy that finds action_reconstruction")
        error = torch.where(mask, evaluation.extras["action_reconstruction"], 0.0)
        per_token["action_reconstruction"] = error
        total = total + options.action_reconstruction_coef * (weights * error).sum()
    if options.aux_loss_coef > 0 and evaluation.aux_loss is not None:
        per_token["aux_loss"] = evaluation.aux_loss.expand_as(weights)
        total = total + options.aux_loss_coef * (weights * evaluation.aux_loss).sum()
    ratio = surrogate.ratio.detach()
    maxima = {"ratio_max": ratio.max(), "ratio_error": (ratio - 1).abs().max()}
    return Loss(total, {name: masked_sum(x.detach(), mask) for name, x in per_token.items()}, {}, maxima)


class CriticFree(Algorithm):
    """An algorithm whose loss is only the policy's."""

    def loss(
        self, evaluation: Evaluation, batch: TrainBatch, *, value_weight: Factor, kl_coef: Factor, train_policy: bool
    ) -> Loss:
        """The surrogate and the terms that the options add to it."""
        return policy_loss(evaluation, batch, self.context, kl_coef)
