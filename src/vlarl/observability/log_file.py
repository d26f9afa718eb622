"""A log file of bounded size, written while a block runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from vlarl.config.secrets import masked
from vlarl.errors import excerpt
from vlarl.observability.terminal import printable

LONGEST_RECORD = 32_000  # characters of a record, its traceback included
LARGEST_LOG = 32 << 20  # bytes of a log file; the previous one is kept in the same folder, as `.1`


class CleanFormatter(logging.Formatter):
    """Writes records without secrets in addresses and without control characters, and truncates long ones."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's lines, those of its exception too."""
        return printable(masked(excerpt(super().format(record), LONGEST_RECORD)))


class BoundedFileHandler(RotatingFileHandler):
    """Keeps two files of a limited size; a full disk loses records, with one warning."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LARGEST_LOG, backupCount=1, encoding="utf-8")
        self._failed = False

    def close(self) -> None:
        """Close the file; records that a full disk refused are lost."""
        with suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Warn once, without logging's traceback: an error that ends the run is reported elsewhere."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError) and not self._failed:
            self._failed = True
            sys.stderr.write(f"warning: cannot write {self.baseFilename}: {error.strerror or error}\n")
        elif not isinstance(error, OSError):
            super().handleError(record)


@contextmanager
def log_to_file(path: Path, logger: str = "vlarl", level: int = logging.INFO, is_shown: bool = False) -> Iterator[Path]:
    """Send a logger's records, and Python's warnings, to a file while the block runs.

    `is_shown`: warnings are shown on stderr, too, as they would be without the file.
    """
    handler = BoundedFileHandler(path)
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    target, warnings_logger = logging.getLogger(logger), logging.getLogger("py.warnings")
    previous_level = target.level
    shown = logging.lastResort if is_shown else None
    if shown is not None:
        target.addHandler(shown)
    target.addHandler(handler)
    warnings_logger.addHandler(handler)
    if target.getEffectiveLevel() > level:
        target.setLevel(level)
    try:
        yield path
    finally:
        target.removeHandler(handler)
        if shown is not None:
            target.removeHandler(shown)
        warnings_logger.removeHandler(handler)
        target.setLevel(previous_level)
        handler.close()


def current_log_file(logger: str = "vlarl") -> Path | None:
    """The file that a logger's records go to now, for messages; None where there is none."""
    handlers = logging.getLogger(logger).handlers
    return next((Path(each.baseFilename) for each in handlers if isinstance(each, logging.FileHandler)), None)
