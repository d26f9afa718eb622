"""CPGD (arXiv:2505.12504): GRPO's advantages, but the gradient of the log-prob instead of the ratio's.

A ratio that explodes can't make the gradient explode, and a drift term keeps the policy near the behaviour policy. The
paper weights a group's centred returns by their std (`normalize_std`) or equally. Its third weight, the inverse
fraction of groups whose returns differ, is implicit here: the denominators exclude groups with equal returns.
"""

from __future__ import annotations

import math

import torch

from vlarl.algorithms.base import AlgorithmContext
from vlarl.algorithms.grpo import GRPO
from vlarl.algorithms.kl import k3
from vlarl.algorithms.losses import bounded_exp, cpgd_loss
from vlarl.algorithms.surrogate import Surrogate, masked_advantages
from vlarl.config.derive import clip_range
from vlarl.decisions import TrainBatch


def clipped_gradient(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: TrainBatch, context: AlgorithmContext
) -> Surrogate:
    """CPGD's surrogate: clipped log-probs, and `policy_drift_coef` times the KL from the policy that acted."""
    options, advantages = context.options, masked_advantages(batch)
    loss, clipped = cpgd_loss(logprobs, old_logprobs, advantages, *clip_range(options))
    if options.policy_drift_coef > 0:
        loss = loss + options.policy_drift_coef * k3(old_logprobs, logprobs, largest=math.inf)
    return Surrogate(loss, bounded_exp(logprobs - old_logprobs), {"clipfrac": clipped})


class CPGD(GRPO):
    """Clipped policy gradient with policy drift."""

    objective = staticmethod(clipped_gradient)
