"""What can be wrong with a configuration, as text a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vlarl.errors import UsageError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what was given, where, and what would be right."""

    subject: str  # what the user wrote: "optim.lr = 'fast' (my.yaml, line 4)"
    message: str  # what is allowed, or the remedy
    paths: tuple[str, ...] = ()  # the options concerned

    def __str__(self) -> str:
        return f"{self.subject}: {self.message}"


class ConfigError(UsageError):
    """A configuration with all its problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        if len(problems) == 1:
            super().__init__(str(problems[0]))
        else:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            super().__init__(f"{len(problems)} problems in the configuration:{lines}")


def shown(value: object) -> str:
    """A value as it is written in YAML, with quotes around text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    return repr(value)


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name most like the given one, if any is alike."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """What to say of a name that does not exist: the nearest one that does, and all of them."""
    match = nearest(name, known)
    hint = f"; did you mean '{match}'? Known: " if match else "; known: "
    return f"unknown {kind}{hint}{', '.join(known)}"
