"""Potential-based shaping, which keeps the optimal policy optimal (Ng, Harada and Russell, ICML 1999)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vlarl.rewards.base import Reward, reward_steps
from vlarl.types import Trajectory


class ShapedReward(Reward):
    """1 for success, and on each step the change of the potential: gamma phi(s') - phi(s).

    The potential phi is the progress since the episode began, added up from the environment's dense rewards. Discounted
    by the same gamma the terms telescope, so that the return of an episode is the same as without them.
    """

    env_reward: Literal["sparse", "dense"] = "dense"
    reads_images = False

    def __init__(self, gamma: float, scale: float = 1.0, bootstraps: bool = False) -> None:
        """`bootstraps`: where the time limit cut an episode off, the algorithm adds the value of its last state, which
        shaping has lowered by that state's potential: it is kept. Every other end has none (Grzes, AAMAS 2017)."""
        self.gamma = gamma
        self.scale = scale
        self.bootstraps = bootstraps

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Assign success to the end, and the change of the potential to every step."""
        progress = np.concatenate([t.rewards[: t.num_executed] for t in trajectory.transitions]).astype(np.float64)
        potential = self.scale * (trajectory.earlier.progress + np.concatenate([[0.0], progress.cumsum()]))
        if trajectory.terminated or not self.bootstraps:
            potential[-1] = 0.0
        rewards = shaping_terms(potential, self.gamma)
        rewards[-1] += float(trajectory.success)
        return reward_steps(trajectory, rewards.tolist())


def shaping_terms(potential: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """[T+1] potentials of the states of an episode -> [T] the reward of each step."""
    terms: NDArray[np.float64] = gamma * potential[1:] - potential[:-1]
    return terms
