"""Where the loop's rollouts come from: collected in turn with the update, or ahead of it.

    in turn     loop:  collect 1 │ update 1 │ collect 2 │ update 2 │ …

    ahead       rollout thread:  collect 1 │ collect 2 │ collect 3 │ …          waits for: permission
                                           ▼           ▼
                loop:                      │ update 1  │ update 2  │ …          waits for: the next rollout

Rollout i may begin once update i - 1 - max_staleness is done, so no decision that is trained on is older than
max_staleness updates. The loop publishes new weights after each update, and the engine takes them between two
decisions, in the middle of a rollout: every decision keeps the version and the log-probs of the weights that made it,
which is what the learner corrects for (`algorithm.importance`). Evaluations use the same environments, so rollouts are
paused meanwhile. With `optim.rollouts_per_update` above 1, rollouts wait in the source until an update is due.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

from vlarl.interrupt import InterruptGuard
from vlarl.types import Rollout, Trajectory

Collect = Callable[[int], Rollout]
"""Collects the rollout of an iteration."""

CHECK_S = 0.2  # how often the loop checks for Ctrl-C while it waits
LEAVE_S = 30.0  # for a rollout to stop, before the run ends without it


class RolloutSource(ABC):
    """Brings the rollouts of the iterations, in their order; a context manager around the loop."""

    def __init__(self) -> None:
        self._waiting: list[Trajectory] = []  # of rollouts that wait for the others of their update

    @abstractmethod
    def get(self, iteration: int) -> Rollout:
        """The rollout of this iteration."""

    def gather(self, rollout: Rollout, update_due: bool) -> list[Trajectory]:
        """What the update is trained on: everything that was gathered since the last one; nothing before it is due."""
        self._waiting += rollout.kept
        if not update_due:
            return []
        gathered, self._waiting = self._waiting, []
        return gathered

    @property
    def num_waiting(self) -> int:
        """Trajectories that wait for the update that they are trained on."""
        return len(self._waiting)

    def updated(self) -> None:
        """Call it once an iteration's update is done and the engine has the new weights."""
        return None

    def paused(self) -> AbstractContextManager[None]:
        """Inside the block no rollout uses the environments."""
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class RolloutsInTurn(RolloutSource):
    """Collects a rollout when the loop wants it."""

    def __init__(self, collect: Collect) -> None:
        super().__init__()
        self._collect = collect

    def get(self, iteration: int) -> Rollout:
        """The rollout of this iteration."""
        return self._collect(iteration)


class RolloutsAhead(RolloutSource):
    """Collects rollouts in a thread of its own, no further ahead than the staleness allows."""

    def __init__(self, collect: Collect, iterations: Iterable[int], max_staleness: int, guard: InterruptGuard) -> None:
        super().__init__()
        self._collect = collect
        self._iterations = iterations
        self._guard = guard
        self._allowed = threading.Semaphore(max_staleness + 1)
        self._environments = threading.Lock()
        self._collected: queue.SimpleQueue[Rollout | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Let the thread end: after the last iteration it has, otherwise it is stopped."""
        if self._thread.is_alive():
            self._guard.request()
            self._allowed.release()
            self._thread.join(LEAVE_S)

    def get(self, iteration: int) -> Rollout:
        """The rollout of this iteration; whatever ended the thread ends the loop here."""
        while True:
            ended = not self._thread.is_alive()  # before looking: what it put last is there then
            try:
                collected = self._collected.get(timeout=0 if ended else CHECK_S)
            except queue.Empty:
                self._guard.check()
                if ended:
                    raise RuntimeError(f"the rollout thread has ended without a rollout {iteration}") from None
                continue
            if isinstance(collected, BaseException):
                raise collected
            return collected

    def updated(self) -> None:
        """One more rollout may begin."""
        self._allowed.release()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block no rollout is under way: the one that is, is finished first."""
        with self._environments:
            yield

    def _run(self) -> None:
        try:
            for iteration in self._iterations:
                self._allowed.acquire()
                self._guard.check()
                with self._environments:
                    rollout = self._collect(iteration)
                self._collected.put(rollout)
        except BaseException as error:  # noqa: BLE001 - a thread's border: the loop raises it
            self._collected.put(error)
