"""Rewards by rule. `RulesReward` scores episodes of a robot; the functions below it score text responses."""

from __future__ import annotations

import re

import numpy as np

from vlarl.rewards.base import Reward, reward_steps
from vlarl.types import Trajectory


class RulesReward(Reward):
    """A value for success, one for failure, and penalties for long episodes and for decisions that move nothing."""

    reads_images = False

    def __init__(
        self,
        success_value: float = 1.0,
        failure_value: float = 0.0,
        length_penalty: float = 0.0,
        length_limit: int = 0,
        idle_penalty: float = 0.0,
        idle_tolerance: float = 1e-3,
    ) -> None:
        self.success_value = success_value
        self.failure_value = failure_value
        self.length_penalty = length_penalty
        self.length_limit = length_limit
        self.idle_penalty = idle_penalty
        self.idle_tolerance = idle_tolerance

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Assign the outcome to the last step, the length penalty to each step past the limit, and the idle penalty to
        the last step of an idle decision."""
        rewards = np.zeros(trajectory.length)
        rewards[max(self.length_limit - trajectory.earlier.num_steps, 0) :] -= self.length_penalty
        ends = np.cumsum([t.num_executed for t in trajectory.transitions]) - 1
        rewards[ends[idle_decisions(trajectory, self.idle_tolerance)]] -= self.idle_penalty
        if not trajectory.continues:
            rewards[-1] += self.success_value if trajectory.success else self.failure_value
        return reward_steps(trajectory, rewards.tolist())


def idle_decisions(trajectory: Trajectory, tolerance: float) -> list[int]:
    """Indices of the decisions after which the robot's state is unchanged, to within the tolerance."""
    states = np.stack([*(t.observation.proprio for t in trajectory.transitions), trajectory.final_observation.proprio])
    moved = np.abs(np.diff(states, axis=0)).max(axis=1)  # [T]
    return [int(index) for index in np.flatnonzero(moved <= tolerance)]


def stop_token_rule(token_ids: list[int], stop_id: int, missing: float = -1.0) -> float:
    """0 for a response that ends with the stop token, `missing` for one that was cut off or continues after it."""
    return 0.0 if token_ids[-1:] == [stop_id] and token_ids.count(stop_id) == 1 else missing


def length_rule(length: int, limit: int, penalty: float) -> float:
    """The penalty of a response of this many tokens: `penalty` for each above the limit."""
    return -penalty * max(length - limit, 0)


def format_rule(response: str, pattern: str, right: float = 0.0, wrong: float = -1.0) -> float:
    """`right` for a response that the regular expression matches as a whole, line breaks included; else `wrong`."""
    return right if re.fullmatch(pattern, response.strip(), re.DOTALL) else wrong
