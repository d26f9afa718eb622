"""Algorithms: how experience becomes a gradient. Pure functions first, then one screen for each algorithm."""

from __future__ import annotations

from vlarl.algorithms.base import Algorithm
from vlarl.algorithms.grpo import GRPO
from vlarl.algorithms.ppo import PPO
from vlarl.config.schema import AlgorithmConfig

ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": GRPO, "ppo": PPO}


def build_algorithm(config: AlgorithmConfig, temperature: float) -> Algorithm:
    """The configured algorithm; `temperature` is the one that the rollout samples with."""
    return ALGORITHMS[config.name](config, temperature)
