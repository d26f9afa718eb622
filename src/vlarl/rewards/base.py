"""The reward contract, and the ways to assign a reward to steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np

from vlarl.errors import VlarlError
from vlarl.types import Trajectory

Scoring = Literal["outcome", "steps", "sum"]


class RewardUnavailableError(VlarlError):
    """The scorer can't be reached after all retries: the sample is not at fault, and others fail as well."""


class RewardTimeoutError(VlarlError):
    """The reward has not returned in time: a retry would take as long."""


class Reward(ABC):
    """Scores trajectories after they were collected."""

    env_reward: Literal["sparse", "dense"] = "sparse"  # the reward that the environment itself returns
    batch_size: int = 1  # how many trajectories are best scored at once
    reads_images: bool = True  # whether it reads camera images: evaluation passes images only then

    @abstractmethod
    def score(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its rewards set."""

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Score several trajectories at once, in their order."""
        return [self.score(trajectory) for trajectory in trajectories]

    def score_some(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory | None]:
        """The same as a part of a combined reward: None for a trajectory that this reward does not concern."""
        return self.score_all(trajectories)

    def move_to_cpu(self) -> bool:
        """Leave a device that failed; False when there is nothing to move."""
        return False


class ScoringReward(Reward):
    """A reward that scores batches of episodes; `scoring` says which steps the scores are assigned to."""

    def __init__(self, scoring: Scoring, batch_size: int) -> None:
        self.scoring = scoring
        self.batch_size = batch_size

    @abstractmethod
    def scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """For each trajectory one score (scoring `outcome`), or one for each of its decisions."""

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Assign the scores of one episode."""
        return self.score_all([trajectory])[0]

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Assign each episode's scores: at its end, or decision by decision."""
        assign = reward_decisions if self.scoring == "steps" else lambda t, scores: reward_at_end(t, sum(scores))
        return [assign(t, scores) for t, scores in zip(trajectories, self.scores(trajectories), strict=True)]


def reward_at_end(trajectory: Trajectory, reward: float) -> Trajectory:
    """The trajectory with one reward, on the last executed step."""
    rewards = [np.zeros_like(t.rewards) for t in trajectory.transitions]
    rewards[-1][trajectory.transitions[-1].num_executed - 1] = reward
    return trajectory.with_rewards(rewards)


def reward_decisions(trajectory: Trajectory, scores: Sequence[float]) -> Trajectory:
    """The trajectory with one reward for each decision, on its last executed step."""
    rewards = [np.zeros_like(t.rewards) for t in trajectory.transitions]
    for transition, row, score in zip(trajectory.transitions, rewards, scores, strict=True):
        row[transition.num_executed - 1] = score
    return trajectory.with_rewards(rewards)


def reward_steps(trajectory: Trajectory, rewards: Sequence[float]) -> Trajectory:
    """The trajectory with one reward for each executed step, in their order."""
    rows, start = [], 0
    for transition in trajectory.transitions:
        row = np.zeros_like(transition.rewards)
        row[: transition.num_executed] = rewards[start : start + transition.num_executed]
        start += transition.num_executed
        rows.append(row)
    return trajectory.with_rewards(rows)
