"""The task sampler as a worker of the cluster. One that is lost is replaced, and goes on from what it last reported."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from vlarl.distributed.actor import Worker
from vlarl.errors import WorkerLostError
from vlarl.types import Observation, Task, Trajectory

log = logging.getLogger(__name__)

_UNSEEN = Observation(np.zeros((0, 0, 0, 3), np.uint8), np.zeros(0, np.float32), "")


class CurriculumWorker:
    """A `Sampler` that asks the worker which has the curriculum."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._state: dict[str, Any] = {}
        self._state = self._ask("state")

    def get_batch(self, iteration: int) -> list[Task]:
        """The tasks of the iteration's groups: each task and initial state `group_size` times, with different seeds."""
        tasks: list[Task] = self._ask("get_batch", iteration)
        return tasks

    def refill(self, iteration: int, first: int, count: int) -> list[Task]:
        """Tasks of `count` more groups of the same iteration; `first` is how many groups it has had so far."""
        tasks: list[Task] = self._ask("refill", iteration, first, count) if count else []
        return tasks

    def report_results(self, trajectories: Iterable[Trajectory]) -> None:
        """Take an iteration's episodes into account; how they ended is enough."""
        self._ask("report_results", [replace(t, transitions=(), final_observation=_UNSEEN) for t in trajectories])
        self._state = self._ask("state")

    def state(self) -> dict[str, Any]:
        """What the next iteration's groups depend on beside seed and number, as JSON can hold it."""
        return self._state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned, or from an earlier run's curriculum."""
        self._ask("restore", dict(state))
        self._state = self._ask("state")

    def describe(self) -> dict[str, Any]:
        """The state in full, for people: the content of curriculum.json."""
        content: dict[str, Any] = self._ask("describe")
        return content

    def metrics(self) -> dict[str, float]:
        """What the curriculum adds to an iteration's row."""
        metrics: dict[str, float] = self._ask("metrics")
        return metrics

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self.worker.get(self.worker.ask(method, *arguments))
        except WorkerLostError as error:
            log.warning("%s It is replaced.", error)
            self.worker.replace()
            if self._state:
                self.worker.get(self.worker.ask("restore", self._state))
            return self.worker.get(self.worker.ask(method, *arguments))
