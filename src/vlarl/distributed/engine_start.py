"""When the engines of a run start: beside the learners, or after them.

    GPUs of their own     engines start ── environments ── learners load ── wait for the engines
    a GPU is shared                        environments ── learners load ── engines start, and measure what is free

An engine that measures a GPU before the learner has loaded would take memory that the learner is about to need, or find
less free than it was given when both load at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

from vlarl.distributed.actor import Worker


class EngineStart:
    """Starts the engines now or, `after_learners`, when the learners have loaded."""

    def __init__(self, start: Callable[[], list[Worker]], after_learners: bool) -> None:
        self._start = start
        self._engines = None if after_learners else start()

    def with_learners(self, load_learners: Callable[[], None]) -> list[Worker]:
        """Load the learners; the engines, which have started before or after that."""
        load_learners()
        if self._engines is None:
            self._engines = self._start()
        return self._engines
