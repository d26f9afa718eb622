"""Where the loop's experience comes from: collected in turn with the update, or ahead of it.

    in turn     loop:  collect 1 │ update 1 │ collect 2 │ update 2 │ …

    ahead       rollout thread:  collect 1 │ collect 2 │ collect 3 │ …          waits for: permission
                                           ▼           ▼
                loop:                      │ update 1  │ update 2  │ …          waits for: the next rollout

Rollout i may begin once update i - 1 - max_staleness is done, so no decision that is learnt from is older than
max_staleness updates. The loop publishes new weights after each update, and the engine takes them between two
decisions, in the middle of a rollout: every decision keeps the version and the log-probs of the weights that made it,
which is what the learner corrects for (`algorithm.importance`). Evaluations use the same environments, so rollouts rest
meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from vlarl.interrupt import InterruptGuard
from vlarl.types import Rollout

Collect = Callable[[int], Rollout]
"""Collects the rollout of an iteration."""

CHECK_S = 0.2  # how often the loop looks whether the user wants to stop, while it waits
LEAVE_S = 30.0  # for a rollout that is told to stop, before the run ends without it


class Rollouts(Protocol):
    """Brings the rollouts of the iterations, in their order; a context manager around the loop."""

    def __enter__(self) -> Rollouts: ...  # noqa: D105

    def __exit__(self, *error: object) -> None: ...  # noqa: D105

    def get(self, iteration: int) -> Rollout:
        """The rollout of this iteration."""
        ...

    def learnt(self, iteration: int) -> None:
        """Told that the policy has learnt from it, and that the engine has the new weights."""
        ...

    def resting(self) -> AbstractContextManager[None]:
        """Inside the block nobody uses the environments."""
        ...


class RolloutsInTurn:
    """Collects a rollout when it is asked for."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def __enter__(self) -> RolloutsInTurn:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def get(self, iteration: int) -> Rollout:
        """The rollout of this iteration."""
        return self._collect(iteration)

    def learnt(self, iteration: int) -> None:
        """Nothing waits for it."""

    def resting(self) -> AbstractContextManager[None]:
        """Nobody uses the environments anyhow."""
        return nullcontext()


class RolloutsAhead:
    """Collects rollouts in a thread of its own, no further ahead than the staleness allows."""

    def __init__(self, collect: Collect, iterations: Iterable[int], max_staleness: int, guard: InterruptGuard) -> None:
        self._collect = collect
        self._iterations = iterations
        self._guard = guard
        self._allowed = threading.Semaphore(max_staleness + 1)
        self._environments = threading.Lock()
        self._collected: queue.SimpleQueue[Rollout | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)

    def __enter__(self) -> RolloutsAhead:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Let the thread end: after the last iteration it has, otherwise it is told to."""
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

    def learnt(self, iteration: int) -> None:
        """One more rollout may begin."""
        self._allowed.release()

    @contextmanager
    def resting(self) -> Iterator[None]:
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
