"""The policy's part of the loss, shared by all clipped-surrogate algorithms."""

from __future__ import annotations

import torch

from vlarl.algorithms.base import Denominators, Loss
from vlarl.algorithms.kl import k3
from vlarl.algorithms.losses import clipped_policy_loss, masked_sum
from vlarl.config.schema import AlgorithmConfig
from vlarl.policies.base import Scores
from vlarl.policies.distribution import token_entropy, token_logprobs
from vlarl.types import TrainBatch


def policy_loss(
    scores: Scores, batch: TrainBatch, over: Denominators, config: AlgorithmConfig, temperature: float
) -> Loss:
    """Clipped surrogate minus entropy bonus; executed tokens only, averaged over all of them in the minibatch."""
    learner_logprobs = token_logprobs(scores.logits, batch.places, temperature)
    with torch.set_grad_enabled(torch.is_grad_enabled() and config.entropy_coef > 0):
        entropy = token_entropy(scores.logits, temperature)
    # Masked before exp: a masked token that overflows would still send 0 * inf = NaN backwards.
    ratio = torch.where(batch.mask, learner_logprobs - batch.old_logprobs, 0.0).exp()
    surrogate, clipped = clipped_policy_loss(ratio, batch.advantages, config.clip_low, config.clip_high)
    surrogate_sum, entropy_sum = masked_sum(surrogate, batch.mask), masked_sum(entropy, batch.mask)
    total = (surrogate_sum - config.entropy_coef * entropy_sum) / over.num_tokens
    with torch.no_grad():
        token_sums = {
            "policy_loss": surrogate_sum.detach(),
            "entropy": entropy_sum.detach(),
            "clipfrac": masked_sum(clipped.float(), batch.mask),
            "approx_kl": masked_sum(k3(batch.old_logprobs, learner_logprobs), batch.mask),
        }
        maxima = {"ratio_max": ratio.max(), "ratio_error": (ratio - 1).abs().max()}
    return Loss(total, token_sums, {}, maxima)
