"""Reward workers: they share the scoring of episodes, behind the contract of one reward.

A worker that is lost is replaced and called again; if a worker is lost again on the same episodes, that is an error,
which the `SafeReward` around the group contains.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from vlarl.config.schema import RewardConfig
from vlarl.distributed.actor import Worker, get_all, replace_lost
from vlarl.errors import VlarlError, WorkerFailedError, WorkerLostError
from vlarl.rewards import RewardContext, build_bare_reward
from vlarl.rewards.base import Reward
from vlarl.types import FloatArray, Observation, Trajectory

log = logging.getLogger(__name__)

NOTHING = Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0, np.float32), "")


@dataclass(frozen=True)
class Scored:
    """What a reward has made of an episode."""

    episode: Trajectory  # without its decisions
    rewards: list[FloatArray]  # [K] of each decision

    @classmethod
    def of(cls, trajectory: Trajectory) -> Scored:
        """Without what was seen and decided."""
        rewards = [np.array(t.rewards) for t in trajectory.transitions]
        return cls(replace(trajectory, transitions=(), final_observation=NOTHING), rewards)

    def onto(self, own: Trajectory) -> Trajectory:
        """The driver's own episode with these rewards."""
        whole = replace(self.episode, transitions=own.transitions, final_observation=own.final_observation)
        return whole.with_rewards(self.rewards)


class FetchingReward(Reward):
    """A reward that reads images, of episodes whose images are elsewhere: fetched for the time of the scoring."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self.env_reward, self.batch_size, self.reads_images = reward.env_reward, reward.batch_size, True

    def score(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its rewards set."""
        return self.score_all([trajectory])[0]

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Score several, in their order."""
        scored = self._reward.score_all([trajectory.whole() for trajectory in trajectories])
        return [Scored.of(theirs).onto(own) for own, theirs in zip(trajectories, scored, strict=True)]

    def move_to_cpu(self) -> bool:
        """Leave a device that failed; False when there is nothing to move."""
        return self._reward.move_to_cpu()


def with_images(reward: Reward) -> Reward:
    """The reward, which fetches images if it reads them."""
    return FetchingReward(reward) if reward.reads_images else reward


class RewardPart:
    """A reward, in the worker's process."""

    def __init__(self, config: RewardConfig, run: RewardContext) -> None:
        self._reward = with_images(build_bare_reward(config, run))

    def facts(self) -> tuple[Literal["sparse", "dense"], int, bool]:
        """Which reward the environment gives, how many episodes to score at once, and whether images are read."""
        return self._reward.env_reward, self._reward.batch_size, self._reward.reads_images

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[Scored]:
        """Score them, in their order: the rewards alone are returned."""
        return [Scored.of(trajectory) for trajectory in self._reward.score_all(trajectories)]


class RewardGroup(Reward):
    """All reward workers as one reward."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self.env_reward, batch_size, self.reads_images = self.workers[0].get(self.workers[0].call("facts"))
        self.batch_size = batch_size * len(self.workers)

    def score(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its rewards set."""
        return self.score_all([trajectory])[0]

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Score several, in their order, split among the workers."""
        try:
            return self._score_all(trajectories)
        except WorkerFailedError as error:
            raise VlarlError(str(error)) from None  # the reward itself: another worker couldn't score them either
        except WorkerLostError as error:
            log.warning("%s It is replaced.", error)
            replace_lost(self.workers, error.worker)
        try:
            return self._score_all(trajectories)
        except WorkerLostError as error:
            raise VlarlError(str(error)) from None

    def _score_all(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        splits = [split for split in np.array_split(np.arange(len(trajectories)), len(self.workers)) if len(split)]
        sent = [trajectory.without_inputs() for trajectory in trajectories]
        if not self.reads_images:
            sent = [trajectory.without_images() for trajectory in sent]
        batches = [[sent[i] for i in split] for split in splits]
        scored = get_all([w.call("score_all", batch) for w, batch in zip(self.workers, batches, strict=False)])
        flat: list[Scored] = [each for batch in scored for each in batch]
        return [theirs.onto(own) for own, theirs in zip(trajectories, flat, strict=True)]
