"""Ctrl-C as a flag that the loop polls, so that it stops at a consistent point."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

STOPPING = "stopping after the current decision or update; press Ctrl-C again to end at once, without saving"


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """A stop was requested."""


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class InterruptGuard:
    """While active, the first SIGINT or SIGTERM sets `requested` and prints a line; a second one interrupts at once."""

    def __init__(self, say: Callable[[str], None] = _say) -> None:
        """`say` shows a line to the user."""
        self.requested = False
        self._say = say
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def request(self) -> None:
        """Request a stop, as Ctrl-C does."""
        self.requested = True

    def check(self) -> None:
        """Raise `Interrupted` if a stop was requested."""
        if self.requested:
            raise Interrupted

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # In a thread: the main thread may hold the stream's lock, which is not reentrant, when the signal arrives.
        threading.Thread(target=self._say, args=(STOPPING,), name="interrupt", daemon=True).start()
