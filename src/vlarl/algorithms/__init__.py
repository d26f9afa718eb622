"""Algorithms: advantages and losses. Pure functions first, then one short class for each algorithm."""

from __future__ import annotations

import numpy as np
import torch

from vlarl.algorithms.base import Algorithm, AlgorithmContext
from vlarl.algorithms.cpgd import CPGD
from vlarl.algorithms.group_norm import GroupNorm
from vlarl.algorithms.grpo import GRPO
from vlarl.algorithms.ppo import PPO
from vlarl.algorithms.reinforce import Reinforce, ReinforceBaseline, ReinforcePlusPlus
from vlarl.algorithms.rloo import RLOO
from vlarl.config.schema import AlgorithmConfig, KlConfig
from vlarl.policies.base import Policy

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "rloo": RLOO,
    "group_norm": GroupNorm,
    "cpgd": CPGD,
    "reinforce": Reinforce,
    "reinforce_baseline": ReinforceBaseline,
    "reinforce_pp": ReinforcePlusPlus,
    "ppo": PPO,
}


def build_algorithm(
    config: AlgorithmConfig, temperature: float, kl: KlConfig | None = None, policy: Policy | None = None
) -> Algorithm:
    """The configured algorithm; `temperature` is the sampling temperature of the rollout.

    `policy` defines how tokens form actions, which action-level ratios and action reconstruction need.
    """
    kl = KlConfig() if kl is None else kl
    if policy is None:
        return ALGORITHMS[config.name](AlgorithmContext(config, kl, temperature))
    return ALGORITHMS[config.name](AlgorithmContext(config, kl, temperature, policy.action_dim, bin_values(policy)))


def bin_values(policy: Policy) -> torch.Tensor:
    """[num_bins] the normalised value of each of the policy's action bins."""
    codec = policy.codec
    ids = np.arange(codec.first_id, codec.first_id + codec.num_bins)
    return torch.from_numpy(codec.decode(np.repeat(ids[:, None], policy.action_dim, axis=1))[:, 0, 0].copy())
