"""Durations: measured, and formatted for people."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from vlarl.observability.trace import NoTrace


def duration(seconds: float) -> str:
    """`0:42`, `3:07` or `1:02:03`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def duration_in_words(seconds: float) -> str:
    """`42 s`, `3 min 7 s` or `1 h 2 min`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {secs} s" if minutes else f"{secs} s"


class Stopwatch:
    """Seconds by name; each timed block is also a span on a track of the timeline."""

    def __init__(self, trace: NoTrace, track: str) -> None:
        self.seconds: dict[str, float] = {}
        self._trace = trace
        self._track = track

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the duration of the block to the total of the name."""
        start = time.monotonic()
        with self._trace.measure(self._track, name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
