"""A timeline of every role of a run, in the trace-event format that ui.perfetto.dev opens.

trace.json is a JSON array, one event a line, that grows with the run. The format does not require the closing bracket
and readers skip an unfinished last event, so the file of a killed run still opens; a resumed run cuts off the
unfinished end and appends.

    [
    {"ph":"M","pid":100000,"tid":100000,"name":"thread_name","args":{"name":"loop"}},
    {"ph":"X","pid":100000,"tid":100000,"name":"rollout","ts":1700000000000000,"dur":2500000}
    ]
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from vlarl.json_files import parse_json
from vlarl.observability.files import disk_errors

MAX_SPANS = 1_000_000  # about 100 MB, and what Perfetto opens in a browser

ROLES = ("loop", "environments", "engine", "reward", "learner")  # from top to bottom, as the data flows
_OTHER_ROLES = 10_000  # roles that are not in ROLES come below them
_TRACKS_OF_A_ROLE = 100_000

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Track:
    """One row of the timeline: a role is shown as a process, each of its members as a thread.

    The ids follow from the name alone, so that a resumed run uses the same tracks. Perfetto names threads by `tid`
    whatever their process, so no two tracks share one.
    """

    name: str
    role: str
    pid: int
    tid: int

    @classmethod
    def of(cls, name: str) -> Track:
        """The track of a name such as `loop` or `engine 0`."""
        role, _, index = name.rpartition(" ")
        if not role or not index.isdecimal():
            role, index = name, ""
        known = role in ROLES
        rank = 1 + ROLES.index(role) if known else _OTHER_ROLES + zlib.crc32(role.encode()) % _OTHER_ROLES
        pid = rank * _TRACKS_OF_A_ROLE
        return cls(name, role, pid, pid + 1 + int(index) % (_TRACKS_OF_A_ROLE - 1) if index else pid)

    def events(self) -> list[dict[str, Any]]:
        """The events that give a viewer the names and the order."""
        return [
            self.event("M", "process_name", args={"name": self.role}),
            self.event("M", "process_sort_index", args={"sort_index": self.pid}),
            self.event("M", "thread_name", args={"name": self.name}),
            self.event("M", "thread_sort_index", args={"sort_index": self.tid}),
        ]

    def event(self, phase: str, name: str, **fields: Any) -> dict[str, Any]:
        """An event on this track."""
        return {"ph": phase, "pid": self.pid, "tid": self.tid, "name": name, **fields}


class NoTrace:
    """A disabled timeline: it accepts every call and writes nothing."""

    def span(self, track: str, name: str, began: float, ended: float, **details: Any) -> None:
        """Add a span from `began` to `ended`, in unix seconds; a viewer shows `details` when it is selected."""

    def measure(self, track: str, name: str, **details: Any) -> AbstractContextManager[None]:
        """A span as long as the block."""
        return nullcontext()

    def close(self) -> None:
        """End the timeline; later spans are dropped."""

    def __enter__(self) -> NoTrace:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Trace(NoTrace):
    """A timeline on disk, for any number of threads. Spans of one track must be disjoint or nested."""

    def __init__(self, path: Path, max_spans: int = MAX_SPANS) -> None:
        """Begin the file, or append to what an earlier session left there."""
        self._path = path
        self._max_spans = max_spans
        self._lock = threading.Lock()
        self._tracks: dict[str, Track] = {}
        with disk_errors(path):
            length, self._num_spans, self._full = _whole_events(path)
            if path.exists():
                os.truncate(path, length)
            self._file: IO[str] | None = path.open("a", encoding="utf-8", errors="replace")
            if length == 0:
                self._file.write("[")
                self._file.flush()
        self._separator = ",\n" if length else "\n"
        self._wall_clock = time.time() - time.monotonic()  # setting the system clock during the run has no effect
        self._last_tick = 0

    def span(self, track: str, name: str, began: float, ended: float, **details: Any) -> None:
        """Add a span from `began` to `ended`, in unix seconds; a viewer shows `details` when it is selected."""
        self._record(track, name, round(began * 1e6), round(ended * 1e6), details)

    @contextmanager
    def measure(self, track: str, name: str, **details: Any) -> Iterator[None]:
        """A span as long as the block, however it ends."""
        began = self._tick()
        try:
            yield
        finally:
            self._record(track, name, began, self._tick(), details)

    def close(self) -> None:
        """End the timeline; later spans are dropped."""
        with self._lock:
            self._put("\n]")
            if self._file is not None:
                self._file.close()
                self._file = None

    def _tick(self) -> int:
        """Microseconds since 1970, each unique: of two spans that begin together a viewer can't tell the outer one."""
        with self._lock:
            now = round((time.monotonic() + self._wall_clock) * 1e6)
            self._last_tick = max(now, self._last_tick + 1)
            return self._last_tick

    def _record(self, track: str, name: str, began: int, ended: int, details: dict[str, Any]) -> None:
        with self._lock:
            if self._file is None or self._full:
                return
            if track not in self._tracks:
                self._tracks[track] = Track.of(track)
                for event in self._tracks[track].events():
                    self._write(event)
            row = self._tracks[track]
            if self._num_spans >= self._max_spans:
                self._full = True
                self._write(row.event("i", f"full: no more than {self._max_spans} spans", ts=ended, s="g"))
                return
            self._num_spans += 1
            fields: dict[str, Any] = {"ts": began, "dur": max(0, ended - began)}  # clocks of two machines may disagree
            if details:
                fields["args"] = {key: _plain(value) for key, value in details.items()}
            self._write(row.event("X", name, **fields))

    def _write(self, event: dict[str, Any]) -> None:
        # Not every version of Perfetto reads \u escapes, hence UTF-8.
        self._put(self._separator + json.dumps(event, ensure_ascii=False, separators=(",", ":")))
        self._separator = ",\n"

    def _put(self, text: str) -> None:
        """Write and flush, so that a kill loses nothing. A full disk ends only the timeline, not the run."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            log.warning("%s ends here, as it can't be written: %s", self._path, error)
            with suppress(OSError):
                self._file.close()  # tries once more to write what is left
            self._file = None


def _plain(value: Any) -> str | int | float | None:
    """A detail as a JSON value."""
    if value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _whole_events(path: Path) -> tuple[int, int, bool]:
    """Bytes up to the end of the last complete event, without its comma; how many spans; whether the file was full."""
    length, position, num_spans, full = 0, 0, 0, False
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                # A line that another one follows was written completely.
                if line.endswith(b",\n") or _is_event(line):
                    length = position + len(line.rstrip(b",\n"))
                    num_spans += line.startswith(b'{"ph":"X"')
                    full |= line.startswith(b'{"ph":"i"')
                position += len(line)
    return length, num_spans, full


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
