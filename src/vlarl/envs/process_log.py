"""The stdout and stderr of a process, kept within bounds by its parent."""

from __future__ import annotations

import fcntl
import os
import tempfile
from typing import IO

from vlarl.errors import excerpt

LARGEST = 8 << 20  # bytes that a process may have written before its log is shortened
KEPT = 1 << 20  # the newest part, which is kept then
TAIL_BYTES = 1 << 16  # searched for the last lines
LONGEST_LINE = 1000  # characters of a line in a message


def appended_file() -> IO[bytes]:
    """An unnamed file; writes append to its end, also after it was shortened."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def shorten(file: IO[bytes]) -> None:
    """Keep only the newest part of a log that has grown too large; its writer must append."""
    if os.fstat(file.fileno()).st_size > LARGEST:
        newest = _end_of(file, KEPT)
        file.truncate(0)
        os.write(file.fileno(), b"(older output was left out)\n" + newest)


def last_lines(file: IO[bytes], count: int) -> list[str]:
    """The last lines of a log, each within bounds."""
    lines = _end_of(file, TAIL_BYTES).decode(errors="replace").strip().splitlines()[-count:]
    return [excerpt(line, LONGEST_LINE) for line in lines]


def _end_of(file: IO[bytes], size: int) -> bytes:
    file.seek(max(0, os.fstat(file.fileno()).st_size - size))
    return file.read(size)
