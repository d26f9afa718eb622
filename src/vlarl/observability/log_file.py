"""A log file for as long as something runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def log_to_file(path: Path, logger: str = "vlarl", level: int = logging.INFO, is_shown: bool = False) -> Iterator[Path]:
    """Send a logger's records, and Python's warnings, to a file while the block runs.

    `is_shown`: warnings are shown on stderr, too, as they would be without the file.
    """
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
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
