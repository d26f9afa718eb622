"""A log file for as long as something runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlarl.config.secrets import masked
from vlarl.observability.terminal import printable


class CleanFormatter(logging.Formatter):
    """Writes records without secrets in addresses and without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's lines, those of its exception too."""
        return printable(masked(super().format(record)))


@contextmanager
def log_to_file(path: Path, logger: str = "vlarl", level: int = logging.INFO) -> Iterator[Path]:
    """Send a logger's records, and Python's warnings, to a file while the block runs."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    target, warnings_logger = logging.getLogger(logger), logging.getLogger("py.warnings")
    previous_level = target.level
    target.addHandler(handler)
    warnings_logger.addHandler(handler)
    if target.getEffectiveLevel() > level:
        target.setLevel(level)
    try:
        yield path
    finally:
        target.removeHandler(handler)
        warnings_logger.removeHandler(handler)
        target.setLevel(previous_level)
        handler.close()


def current_log_file(logger: str = "vlarl") -> Path | None:
    """The file that a logger's records go to now, for messages; None where there is none."""
    handlers = logging.getLogger(logger).handlers
    return next((Path(each.baseFilename) for each in handlers if isinstance(each, logging.FileHandler)), None)
