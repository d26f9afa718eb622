"""Ctrl-C as a question that the loop asks, so that it stops where nothing is half done."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

STOPPING = "stopping after the decision or update under way; press Ctrl-C again to end at once, without saving"


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """The user asked to stop."""


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class InterruptGuard:
    """While active, the first SIGINT or SIGTERM is noted and said; a second one interrupts at once."""

    def __init__(self, say: Callable[[str], None] = _say) -> None:
        """`say` shows a line to the user."""
        self.requested = False
        self._say = say
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python gives signals to the main thread alone
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def request(self) -> None:
        """Ask to stop, as the user would."""
        self.requested = True

    def check(self) -> None:
        """Raise `Interrupted` if the user asked to stop."""
        if self.requested:
            raise Interrupted

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # In a thread: the signal may have come while the main one was writing, with a lock that is not given twice.
        threading.Thread(target=self._say, args=(STOPPING,), name="interrupt", daemon=True).start()
