"""The learner and the engine of a run as a pair: which weights the engine has, and when it gets others.

publish ──► send ──► colocated: the engine reads the learner's own memory, nothing is copied
                     cluster:   WeightSender of rank 0 ──► WeightReceiver of every engine
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol


class Average(Protocol):
    """The moving average of the weights."""

    def in_place(self) -> AbstractContextManager[None]:
        """Inside the block the policy has the averages for its weights."""
        ...


class Versioned(Protocol):
    """A learner or an engine."""

    @property
    def version(self) -> int:
        """Updates that its weights have had."""
        ...


class WeightSync:
    """Keeps an engine at its learner's weights."""

    def __init__(
        self, learner: Versioned, engine: Versioned, send: Callable[[], None], evaluated: Average | None
    ) -> None:
        """`send` brings the engine to the learner's weights; `evaluated` is the average to evaluate, None for the
        newest weights."""
        self._learner, self._engine, self._send, self._evaluated = learner, engine, send, evaluated

    def publish(self) -> None:
        """Bring the engine to the learner's weights and version."""
        self._send()
        if self._engine.version != self._learner.version:
            raise RuntimeError(
                f"the engine runs version {self._engine.version} after a sync to version {self._learner.version}"
            )

    def for_evaluation(self) -> AbstractContextManager[None]:
        """Inside the block the engine has the weights used for evaluations: the newest, or their average."""
        return nullcontext() if self._evaluated is None else self._with_average(self._evaluated)

    @contextmanager
    def _with_average(self, average: Average) -> Iterator[None]:
        with average.in_place():
            self.publish()
            yield
        self.publish()
