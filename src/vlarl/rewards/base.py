"""The reward contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from vlarl.types import Trajectory


class Reward(ABC):
    """Scores trajectories after they were collected."""

    env_reward: Literal["sparse", "dense"] = "sparse"  # what the environment itself is asked to pay

    @abstractmethod
    def score(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its rewards set."""


def pay_at_the_end(trajectory: Trajectory, reward: float) -> Trajectory:
    """The trajectory with one reward, on the last executed step."""
    rewards = [np.zeros_like(t.rewards) for t in trajectory.transitions]
    rewards[-1][trajectory.transitions[-1].num_executed - 1] = reward
    return trajectory.with_rewards(rewards)
