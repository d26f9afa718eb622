"""Reward workers: episodes are scored by as many of them as there are, behind the contract of one reward.

A worker that is lost is replaced and asked again; one that is lost twice over the same episodes is an error, which the
`SafeReward` around the group contains.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
    """A reward, over there."""

    def __init__(self, config: RewardConfig, run: RewardContext) -> None:
        self._reward = build_bare_reward(config, run)

    def facts(self) -> tuple[Literal["sparse", "dense"], int, bool]:
        """What the environment is asked to pay, how many episodes are best scored at once, and whether by images."""
        return self._reward.env_reward, self._reward.batch_size, self._reward.reads_images

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Score them, in their order."""
        return self._reward.score_all(trajectories)


class RewardGroup(Reward):
    """All reward workers as one reward."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self.env_reward, batch_size, self.reads_images = self.workers[0].get(self.workers[0].ask("facts"))
        self.batch_size = batch_size * len(self.workers)

    def score(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its rewards set."""
        return self.score_all([trajectory])[0]

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Several at once, in their order, each worker some of them."""
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
        places = [part for part in np.array_split(np.arange(len(trajectories)), len(self.workers)) if len(part)]
        shares = [[trajectories[place] for place in part] for part in places]
        scored = get_all([w.ask("score_all", share) for w, share in zip(self.workers, shares, strict=False)])
        return [trajectory for share in scored for trajectory in share]
