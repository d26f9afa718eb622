"""The correction for tokens that an older policy sampled: decoupled PPO (arXiv:2505.24298), its weights truncated.

    policy that sampled ──weight──► policy before the first step ──ratio, clipped──► policy that learns

The weight is not part of the ratio, so the clip holds the policy near the newest weights, not near stale ones.
"""

from __future__ import annotations

import torch

from vlarl.config.schema import Config
from vlarl.decisions import TrainBatch


def corrects(config: Config) -> bool:
    """Whether tokens are weighted; `auto` does so for stale rollouts, unless the ratio starts at the engine's."""
    algorithm = config.algorithm
    if algorithm.importance == "auto":
        return config.distributed.asynchronous and algorithm.old_logprobs == "learner"
    return algorithm.importance == "truncated"


def importance_weights(batch: TrainBatch, learner_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """[N, L] how much likelier the learner finds each element than the engine that sampled it, `cap` at most.

    What was not executed may be anything, even NaN.
    """
    return (learner_logprobs - batch.decisions.engine_logprobs).exp().clamp(max=cap)
