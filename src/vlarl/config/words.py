"""Counts and paths as people read them, for every line that vlarl prints."""

from __future__ import annotations

from pathlib import Path

_PLURALS = {"process": "processes", "breach": "breaches", "index": "indices", "trajectory": "trajectories"}


def plural(count: int, noun: str) -> str:
    """`episode` for one, `episodes` for any other count."""
    return noun if count == 1 else _PLURALS.get(noun, f"{noun}s")


def counted(count: int, noun: str) -> str:
    """`1 episode`, `2 episodes`, `1,200 steps`."""
    return f"{count:,} {plural(count, noun)}"


def brief_path(path: Path | str) -> str:
    """A path as one would type it: relative to the working folder where it lies inside it, else absolute."""
    absolute = Path(path).expanduser().absolute()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except (ValueError, OSError):  # the second one: the working folder has been deleted
        return str(absolute)
