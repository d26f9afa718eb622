"""Counts with singular and plural nouns, for everything that vlarl prints."""

from __future__ import annotations

_PLURALS = {"process": "processes", "breach": "breaches", "index": "indices", "trajectory": "trajectories"}


def plural(count: int, noun: str) -> str:
    """`episode` for one, `episodes` for any other count."""
    return noun if count == 1 else _PLURALS.get(noun, f"{noun}s")


def counted(count: int, noun: str) -> str:
    """`1 episode`, `2 episodes`, `1,200 steps`."""
    return f"{count:,} {plural(count, noun)}"
