"""Rewards that the environment itself provides."""

from __future__ import annotations

from typing import Literal

from vlarl.rewards.base import Reward, reward_at_end
from vlarl.types import Trajectory


class SparseReward(Reward):
    """1 for success on the last executed step, 0 for everything else."""

    reads_images = False

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Reward success alone, whatever the environment's rewards."""
        return reward_at_end(trajectory, float(trajectory.success))


class DenseReward(Reward):
    """The environment's own shaped reward, step by step."""

    env_reward: Literal["sparse", "dense"] = "dense"
    reads_images = False

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Leave the environment's rewards as they are."""
        return trajectory
