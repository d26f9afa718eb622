"""The task sampler as a worker of the cluster. If lost, it is replaced and resumes from its last reported state."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlarl.distributed.actor import Worker
from vlarl.errors import WorkerLostError
from vlarl.types import Observation, Task, Trajectory

log = logging.getLogger(__name__)

_UNSEEN = Observation(np.zeros((0, 0, 0, 3), np.uint8), np.zeros(0, np.float32), "")


class CurriculumWorker:
    """A `Sampler` that calls the worker which has the curriculum."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._state: dict[str, Any] = {}
        self._state = self._call("state")

    def get_batch(self, iteration: int, unreported: int = 0) -> list[Task]:
        """The tasks of the iteration's groups: each task and initial state `group_size` times, with different seeds."""
        tasks: list[Task] = self._call("get_batch", iteration, unreported)
        return tasks

    def refill(self, iteration: int, first: int, count: int) -> list[Task]:
        """Tasks of `count` more groups of the same iteration; `first` is how many groups it has had so far."""
        tasks: list[Task] = self._call("refill", iteration, first, count) if count else []
        return tasks

    def get_episodes(self, indices: Sequence[int]) -> list[Task]:
        """The tasks of single episodes, which are counted over the whole run: for rollouts of a fixed length."""
        tasks: list[Task] = self._call("get_episodes", list(indices))
        return tasks

    def report_results(self, trajectories: Iterable[Trajectory]) -> None:
        """Take an iteration's episodes into account; only their outcomes are sent."""
        self._call("report_results", [replace(t, transitions=(), final_observation=_UNSEEN) for t in trajectories])
        self._state = self._call("state")

    def state(self) -> dict[str, Any]:
        """What the next iteration's groups depend on besides seed and iteration, as JSON can hold it."""
        return self._state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned, or from an earlier run's curriculum."""
        self._call("restore", dict(state))
        self._state = self._call("state")

    def describe(self) -> dict[str, Any]:
        """The state in full, for people: the content of curriculum.json."""
        content: dict[str, Any] = self._call("describe")
        return content

    def metrics(self) -> dict[str, float]:
        """What the curriculum adds to an iteration's row."""
        metrics: dict[str, float] = self._call("metrics")
        return metrics

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return self.worker.get(self.worker.call(method, *arguments))
        except WorkerLostError as error:
            log.warning("%s It is replaced.", error)
            self.worker.replace()
            if self._state:
                self.worker.get(self.worker.call("restore", self._state))
            return self.worker.get(self.worker.call(method, *arguments))
