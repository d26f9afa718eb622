"""The policy loss, shared by all algorithms; and the base class of those without a critic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vlarl.algorithms.base import Algorithm, AlgorithmContext, Loss
from vlarl.algorithms.kl import ESTIMATORS, k3
from vlarl.algorithms.losses import (
    clipped_policy_loss,
    dual_clip,
    masked_sum,
    probability_ratio,
    reconstruction_loss,
)
from vlarl.config.derive import clip_range, kl_estimator
from vlarl.policies.base import Scores
from vlarl.policies.distribution import token_entropy, token_logprobs
from vlarl.types import TrainBatch


@dataclass(frozen=True)
class Surrogate:
    """The per-token objective of the policy gradient."""

    loss: torch.Tensor  # [N, K*D]
    ratio: torch.Tensor  # [N, K*D] of the trained policy to the behaviour policy
    events: dict[str, torch.Tensor]  # metric -> [N, K*D] bool, where it happened


Objective = Callable[[torch.Tensor, torch.Tensor, TrainBatch, AlgorithmContext], Surrogate]
"""(log-probs [N, K*D], old ones, batch with advantages of 0 where masked, setting) -> surrogate."""


def clipped_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: TrainBatch, setting: AlgorithmContext
) -> Surrogate:
    """PPO's clipped surrogate, of the ratio at the configured level.

    Tokens that are not selected contribute to the value of a ratio that several tokens share, not to its gradient.
    """
    options, advantages = setting.options, torch.where(batch.mask, batch.advantages, 0.0)
    if batch.selected is not None:
        logprobs = torch.where(batch.selected, logprobs, logprobs.detach())
    ratio = probability_ratio(
        logprobs - old_logprobs, options.ratio_level, setting.action_dim, batch.sequence_log_ratio
    )
    loss, clipped = clipped_policy_loss(ratio, advantages, *clip_range(options))
    events = {"clipfrac": clipped}
    if options.dual_clip is not None:
        loss, events["dual_clipfrac"] = dual_clip(loss, advantages, options.dual_clip)
    return Surrogate(loss, ratio, events)


def policy_loss(
    scores: Scores, batch: TrainBatch, setting: AlgorithmContext, kl_coef: float, objective: Objective = clipped_ratio
) -> Loss:
    """The surrogate minus the entropy bonus, plus the optional terms: over executed tokens, by their weights."""
    options, mask, weights = setting.options, batch.mask, batch.weights
    if weights is None:
        raise ValueError("the batch has no token weights: split it into minibatches first")
    # Mask before computing anything: an overflow in a masked token would backpropagate 0 * inf = NaN.
    logits = scores.logits.masked_fill(~mask.unsqueeze(-1), 0.0)
    logprobs = token_logprobs(logits, batch.places, setting.temperature)
    unmoved = logprobs.detach()
    old_logprobs = torch.where(mask, batch.old_logprobs, unmoved)
    with torch.set_grad_enabled(torch.is_grad_enabled() and options.entropy_coef > 0):
        entropy = token_entropy(logits, setting.temperature)
    surrogate = objective(logprobs, old_logprobs, batch, setting)
    total = (weights * surrogate.loss).sum() - options.entropy_coef * (weights * entropy).sum()
    per_token = {"policy_loss": surrogate.loss, "entropy": entropy, "approx_kl": k3(old_logprobs, unmoved)}
    per_token |= {name: event.float() for name, event in surrogate.events.items()}
    if batch.ref_logprobs is not None:
        ref_logprobs = torch.where(mask, batch.ref_logprobs, unmoved)
        per_token["kl_ref"] = kl = ESTIMATORS[kl_estimator(setting.kl)](logprobs, ref_logprobs)
        if setting.kl.place == "loss":
            total = total + kl_coef * (weights * kl).sum()
    if options.action_reconstruction_coef > 0:
        if setting.bins is None:
            raise ValueError("action_reconstruction_coef needs the values of bins: give build_algorithm the policy")
        error = reconstruction_loss(logits, batch.places, setting.bins.to(logits.device), setting.temperature)
        per_token["action_reconstruction"] = error
        total = total + options.action_reconstruction_coef * (weights * error).sum()
    if options.aux_loss_coef > 0 and scores.aux_loss is not None:
        per_token["aux_loss"] = scores.aux_loss.expand_as(weights)
        total = total + options.aux_loss_coef * (weights * scores.aux_loss).sum()
    ratio = surrogate.ratio.detach()
    maxima = {"ratio_max": ratio.max(), "ratio_error": (ratio - 1).abs().max()}
    return Loss(total, {name: masked_sum(x.detach(), mask) for name, x in per_token.items()}, {}, maxima)


class CriticFree(Algorithm):
    """An algorithm whose loss is only the policy's."""

    objective: Objective = staticmethod(clipped_ratio)

    def loss(
        self, scores: Scores, batch: TrainBatch, *, value_weight: float, kl_coef: float, train_policy: bool
    ) -> Loss:
        """The surrogate and the terms that the options add to it."""
        return policy_loss(scores, batch, self.setting, kl_coef, self.objective)
