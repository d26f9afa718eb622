"""Calls with a deadline.

    caller ── work ──► thread, which runs one call after another
           ◄── its result, or DeadlineError when the time is up: the thread is abandoned, the next call gets a new one

A thread can't be killed. SystemExit is raised in an abandoned one, which ends Python code at its next line; code that
hangs inside a library or the system stays until that returns, or until the process ends.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

Call = tuple[Callable[[], Any], "queue.SimpleQueue[tuple[Any, BaseException | None]]"]


class DeadlineError(TimeoutError):
    """A call has not returned in time."""


class TimedCaller:
    """Runs calls in a separate thread, always the same one as long as calls return in time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: _CallThread | None = None

    def call(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Return or raise what the work does; DeadlineError if it does neither in time."""
        if self._thread is None:
            self._thread = _CallThread(self._name)
            self._thread.start()
        results: queue.SimpleQueue[tuple[Result, BaseException | None]] = queue.SimpleQueue()
        self._thread.calls.put((work, results))
        try:
            result, error = results.get(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        except queue.Empty:
            self._give_up()
            raise DeadlineError(f"took longer than {timeout_s:g} s") from None
        except KeyboardInterrupt:
            self._give_up()
            raise
        if error is not None:
            raise error
        return result

    def _give_up(self) -> None:
        if self._thread is not None:
            self._thread.give_up()
            self._thread = None


class _CallThread(threading.Thread):
    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._given_up = False

    def run(self) -> None:
        while not self._given_up:
            work, results = self.calls.get()
            try:
                results.put((work(), None))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                results.put((None, error))

    def give_up(self) -> None:
        """Raise SystemExit in the thread, at the next line of Python that it runs."""
        self._given_up = True
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(SystemExit))


def call_in_time(work: Callable[[], Result], timeout_s: float, name: str = "call") -> Result:
    """One call with a deadline; DeadlineError if it does not return in time."""
    return TimedCaller(name).call(work, timeout_s)
