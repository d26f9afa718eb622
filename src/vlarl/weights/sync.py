"""The learner and the engine of a run as a pair: which weights the engine has, and when it gets others.

publish ──► send ──► colocated: the engine reads the learner's own memory, nothing is copied
                     cluster:   WeightSender of rank 0 ──► WeightReceiver of every engine
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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


@dataclass(frozen=True)
class SyncCost:
    """What a sync took, with all that was sent in vain to engines that were lost."""

    seconds: float
    commit_seconds: float  # in which no engine could act
    num_bytes: int  # of the weights that were sent to one engine
    num_resent: int  # buckets that arrived damaged

    def metrics(self) -> dict[str, float]:
        """As columns of the iteration's row."""
        return {
            "sync/seconds": self.seconds,
            "sync/commit_seconds": self.commit_seconds,
            "sync/bytes": float(self.num_bytes),
            "sync/resent_buckets": float(self.num_resent),
        }


class WeightSync:
    """Keeps an engine at its learner's weights."""

    def __init__(
        self, learner: Versioned, engine: Versioned, send: Callable[[], SyncCost | None], evaluated: Average | None
    ) -> None:
        """`send` brings the engine to the learner's weights, and returns what that took, or None if nothing is copied;
        `evaluated` is the average to evaluate, None for the newest weights."""
        self._learner, self._engine, self._send, self._evaluated = learner, engine, send, evaluated

    def publish(self) -> dict[str, float]:
        """Bring the engine to the learner's weights and version; returns the metrics of the sync, if anything was
        copied."""
        cost = self._send()
        if self._engine.version != self._learner.version:
            raise RuntimeError(
                f"the engine runs version {self._engine.version} after a sync to version {self._learner.version}"
            )
        return {} if cost is None else cost.metrics()

    def for_evaluation(self) -> AbstractContextManager[None]:
        """Inside the block the engine has the weights used for evaluations: the newest, or their average."""
        return nullcontext() if self._evaluated is None else self._with_average(self._evaluated)

    @contextmanager
    def _with_average(self, average: Average) -> Iterator[None]:
        with average.in_place():
            self.publish()
            yield
        self.publish()
