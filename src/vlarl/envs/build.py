"""From the configuration to parallel environments."""

from __future__ import annotations

from typing import Literal

from vlarl.config.schema import EnvConfig
from vlarl.envs.base import EnvPool
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.envs.tabletop.tasks import SUITES
from vlarl.errors import UsageError


def build_pool(config: EnvConfig, num_envs: int, image_size: int, reward: Literal["sparse", "dense"]) -> EnvPool:
    """Parallel environments of the configured suite."""
    if config.suite not in SUITES:
        raise UsageError(f"env.suite: there is no suite {config.suite!r}; choose one of {', '.join(SUITES)}.")
    return TabletopPool(config.suite, num_envs, image_size, config.cameras, reward)
