"""Algorithms: advantages and losses. Pure functions first, then one short class for each algorithm."""

from __future__ import annotations

from vlarl.algorithms.base import Algorithm, AlgorithmContext
from vlarl.algorithms.group_norm import GroupNorm
from vlarl.algorithms.grpo import GRPO
from vlarl.algorithms.ppo import PPO
from vlarl.algorithms.reinforce import Reinforce, ReinforceBaseline, ReinforcePlusPlus
from vlarl.algorithms.rloo import RLOO
from vlarl.config.schema import AlgorithmConfig, KlConfig

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "rloo": RLOO,
    "group_norm": GroupNorm,
    "cpgd": GRPO,  # with the loss that config/derive.py chooses for it
    "reinforce": Reinforce,
    "reinforce_baseline": ReinforceBaseline,
    "reinforce_pp": ReinforcePlusPlus,
    "ppo": PPO,
}


def build_algorithm(config: AlgorithmConfig, temperature: float, kl: KlConfig | None = None) -> Algorithm:
    """The configured algorithm; `temperature` is the one that the rollout samples with."""
    return ALGORITHMS[config.name](AlgorithmContext(config, KlConfig() if kl is None else kl, temperature))
