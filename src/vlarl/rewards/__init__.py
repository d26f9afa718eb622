"""Rewards: what is good about a trajectory."""

from __future__ import annotations

from vlarl.rewards.base import Reward
from vlarl.rewards.function import FunctionReward
from vlarl.rewards.outcome import DenseReward, SparseReward

REWARDS: dict[str, type[Reward]] = {"sparse": SparseReward, "dense": DenseReward}


def build_reward(source: str) -> Reward:
    """The named reward, or the user's own `module:function`."""
    return REWARDS[source]() if source in REWARDS else FunctionReward(source)
