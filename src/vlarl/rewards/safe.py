"""Handling of failed rewards: retried, logged, counted and replaced; too many failures end the run."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from vlarl.errors import ClusterError, RowsLostError, VlarlError, excerpt
from vlarl.rewards.base import Reward, RewardTimeoutError, RewardUnavailableError
from vlarl.types import Trajectory

log = logging.getLogger(__name__)

MIN_EPISODES = 8  # fewer say little about the failure rate: they are counted together with the next ones
MAX_TIMEOUTS = 3  # in a row, before the run ends


class RewardFailureError(VlarlError):
    """The reward failed on a larger fraction of episodes than reward.max_failure_rate, or no longer returns."""


class SafeReward(Reward):
    """Any reward; a failure affects only its own episode."""

    def __init__(
        self,
        reward: Reward,
        retries: int = 2,
        fallback: Literal["drop", "zero"] = "drop",
        max_failure_rate: float = 0.5,
    ) -> None:
        self.reward = reward
        self.retries = retries
        self.fallback = fallback
        self.max_failure_rate = max_failure_rate
        self.env_reward = reward.env_reward
        self.batch_size = reward.batch_size
        self.reads_images = reward.reads_images
        self.min_judged = MIN_EPISODES  # before the failure rate is checked
        self._judged = self._failed = 0  # since the failure rate was last checked
        self._last_failure = ("", "")  # its episode, and its cause
        self._is_announced = False  # whether `_judged` includes episodes that are not scored yet
        self._timeouts = 0  # episodes in a row on which it has not returned in time

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Score one episode; one that can't be scored has its `reward_error` set."""
        return self.score_all([trajectory])[0]

    def score_all(
        self, trajectories: Sequence[Trajectory], before_each: Callable[[], None] = lambda: None
    ) -> list[Trajectory]:
        """Score all episodes that are ok; those that can't be scored have their `reward_error` set. One whose images
        were lost with a machine counts as crashed.

        `before_each` is called before each batch, and may raise to stop.
        """
        scored = list(trajectories)
        indices = [index for index, trajectory in enumerate(trajectories) if trajectory.status == "ok"]
        self._judged += 0 if self._is_announced else len(indices)
        for start in range(0, len(indices), self.batch_size):
            before_each()
            batch = indices[start : start + self.batch_size]
            for index, result in zip(batch, self._score_batch([trajectories[i] for i in batch]), strict=True):
                scored[index] = result
                if result.reward_error is not None:
                    self._failed += 1
                    self._last_failure = result.task.episode_id, result.reward_error
                    self._stop_if_too_many()
        if self._judged >= self.min_judged and not self._is_announced:
            self._stop_if_too_many()  # those that failed may have come before there were enough
            self._judged = self._failed = 0
        return scored

    def for_evaluation(self, num_episodes: int) -> SafeReward:
        """The same reward for `num_episodes` episodes, scored in any portions: its failure rate is that of all of them,
        separate from that of rollouts."""
        other = copy.copy(self)
        other._judged, other._failed, other._is_announced = num_episodes, 0, True
        return other

    def judged_over(self, num_episodes: int) -> SafeReward:
        """The same reward for episodes that come a few at a time: its failure rate is that of `num_episodes`."""
        other = copy.copy(self)
        other.min_judged = max(self.min_judged, num_episodes)
        return other

    def _score_batch(self, batch: list[Trajectory]) -> list[Trajectory]:
        """Score a batch at once; where that fails, each episode by itself, so that only those at fault are lost."""
        if len(batch) == 1:
            return [self._score_one(batch[0])]
        try:
            results = self._call(batch)
        except RewardUnavailableError as error:
            return [self._replacement(trajectory, error) for trajectory in batch]
        except RowsLostError:
            return [self._score_one(trajectory) for trajectory in batch]  # of some of them
        except ClusterError:
            raise  # not specific to these episodes: the run can't continue
        except Exception:
            log.warning("a batch of %d rewards failed; each episode is scored by itself", len(batch), exc_info=True)
            return [self._score_one(trajectory) for trajectory in batch]
        return [r if is_finite(r) else self._score_one(t) for t, r in zip(batch, results, strict=True)]

    def _score_one(self, trajectory: Trajectory) -> Trajectory:
        problem: Exception = VlarlError("it returned a number that is not finite.")
        for _ in range(self.retries + 1):
            try:
                (result,) = self._call([trajectory])
            except RewardUnavailableError as error:
                return self._replacement(trajectory, error)
            except RewardTimeoutError as error:
                self._timeouts += 1
                self._stop_if_hanging(trajectory, error)
                return self._replacement(trajectory, error)
            except RowsLostError as error:
                log.warning("episode %s is left out: %s", trajectory.task.episode_id, error)
                return replace(_without_rewards(trajectory), status="crashed")  # not the reward's fault
            except ClusterError:
                raise
            except Exception as error:
                problem = error
            else:
                self._timeouts = 0
                if is_finite(result):
                    return result
        return self._replacement(trajectory, problem)

    def _call(self, batch: list[Trajectory]) -> list[Trajectory]:
        try:
            return self.reward.score_all(batch)
        except Exception as error:
            if not is_device_fault(error) or not self.reward.move_to_cpu():
                raise
            log.warning("the reward's device failed (%s): it continues on the CPU", error)
            return self.reward.score_all(batch)

    def _replacement(self, trajectory: Trajectory, error: Exception) -> Trajectory:
        log.error("the reward of episode %s failed", trajectory.task.episode_id, exc_info=error)
        status: Literal["ok", "reward_failed"] = "ok" if self.fallback == "zero" else "reward_failed"
        reason = excerpt(f"{type(error).__name__}: {error}")
        return replace(_without_rewards(trajectory), status=status, reward_error=reason)

    def _stop_if_too_many(self) -> None:
        """Checked before all are scored: there is no point in waiting for a service that is down."""
        if self._judged >= self.min_judged and self._failed > self.max_failure_rate * self._judged:
            episode, cause = self._last_failure
            raise RewardFailureError(
                f"the reward failed on {self._failed} of {self._judged} episodes, more than reward.max_failure_rate = "
                f"{self.max_failure_rate} allows. The last was {episode}: {cause.rstrip('.')}. The log has the "
                "traceback of each. Fix the reward, or raise reward.max_failure_rate, and resume."
            )

    def _stop_if_hanging(self, last: Trajectory, error: RewardTimeoutError) -> None:
        """Each timeout costs the whole time limit, and may leave a thread behind that never ends."""
        if self._timeouts >= MAX_TIMEOUTS:
            raise RewardFailureError(
                f"the reward has not returned in time on {self._timeouts} episodes in a row. The last was "
                f"{last.task.episode_id}: {error} Fix the reward, or raise reward.timeout_s, and resume."
            ) from error


def _without_rewards(trajectory: Trajectory) -> Trajectory:
    """The episode with rewards of zero."""
    return trajectory.with_rewards([np.zeros_like(t.rewards) for t in trajectory.transitions])


def is_finite(trajectory: Trajectory) -> bool:
    """Whether all rewards are finite."""
    return all(bool(np.isfinite(t.rewards).all()) for t in trajectory.transitions)


def is_device_fault(error: Exception) -> bool:
    """Whether an accelerator failed, by running out of memory or otherwise, and not the computation."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(
        word in str(error) for word in ("CUDA", "cuBLAS", "CUBLAS", "cuDNN", "CUDNN", "HIP error")
    )
