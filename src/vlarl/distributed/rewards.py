"""Reward workers: they share the scoring of episodes, behind the contract of one reward.

A worker that is lost is replaced and called again; if a worker is lost again on the same episodes, that is an error,
which the `SafeReward` around the group contains.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from vlarl.config.schema import RewardConfig
from vlarl.distributed.actor import Worker, get_all
from vlarl.errors import VlarlError, WorkerFailedError, WorkerLostError
from vlarl.rewards import RewardContext, build_bare_reward
from vlarl.rewards.base import Reward
from vlarl.types import Trajectory

log = logging.getLogger(__name__)


class RewardPart:
    """A reward, in the worker's process."""

    def __init__(self, config: RewardConfig, run: RewardContext) -> None:
        self._reward = build_bare_reward(config, run)

    def facts(self) -> tuple[Literal["sparse", "dense"], int, bool]:
        """Which reward the environment gives, how many episodes to score at once, and whether images are read."""
        return self._reward.env_reward, self._reward.batch_size, self._reward.reads_images

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Score them, in their order."""
        return self._reward.score_all(trajectories)


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
            next(worker for worker in self.workers if worker.name == error.worker).replace()
        try:
            return self._score_all(trajectories)
        except WorkerLostError as error:
            raise VlarlError(str(error)) from None

    def _score_all(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        splits = [split for split in np.array_split(np.arange(len(trajectories)), len(self.workers)) if len(split)]
        batches = [[trajectories[i].without_inputs() for i in split] for split in splits]
        scored = get_all([w.call("score_all", batch) for w, batch in zip(self.workers, batches, strict=False)])
        flat = [trajectory for batch in scored for trajectory in batch]
        return [_assigned(own, theirs) for own, theirs in zip(trajectories, flat, strict=True)]


def _assigned(own: Trajectory, scored: Trajectory) -> Trajectory:
    """The driver's own episode with the rewards of the scored one, whose arrays hold memory of the object store."""
    rewards = [np.array(t.rewards) for t in scored.transitions]
    whole = replace(scored, transitions=own.transitions, final_observation=own.final_observation)
    return whole.with_rewards(rewards)
