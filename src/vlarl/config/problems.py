"""Problems of a configuration, as messages with a remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vlarl.errors import UsageError

MAX_PROBLEMS = 30
"""Problems that are listed; the rest are mostly repetitions."""
MAX_SHOWN = 200  # characters of a value
LONGEST_NAME = 100  # characters of a name that others are compared with


@dataclass(frozen=True)
class Problem:
    """One mistake: what was given, where, and what is allowed."""

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
            lines = "".join(f"\n  - {problem}" for problem in problems[:MAX_PROBLEMS])
            more = f"\n  - and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
            super().__init__(f"{len(problems)} problems in the configuration:{lines}{more}")


class FrozenConfigError(UsageError, AttributeError):
    """Assignment to an option of an existing configuration."""

    def __init__(self, path: str, value: object) -> None:
        remedy = f"vlarl.load_config(config, {{{path!r}: {value!r}}})"
        super().__init__(f"{path}: a configuration can't be changed; make a new one from it with {remedy}")


def shown(value: object) -> str:
    """A value as it is written in YAML, with quotes around text; a long one is truncated."""
    text = _written(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_written(item) for item in value[:MAX_SHOWN]) + "]"
    if isinstance(value, int) and abs(value) >= 10**100:
        return "an integer of more than 100 digits"
    return repr(value[: 2 * MAX_SHOWN] if isinstance(value, str | bytes) else value)


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name most similar to the given one, if any is similar enough."""
    if len(name) > LONGEST_NAME:
        return None
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def as_module(name: str, what: str) -> str | None:
    """The advice for a file given in place of a module, such as `my_reward.py:f`; None if no file is named."""
    place, _, own = name.partition(":")
    if not place.endswith(".py") or not re.fullmatch(r"[\w./-]+", place):
        return None
    module = place.removesuffix(".py").removeprefix("./").replace("/", ".")
    named = f"{module}:{own or what}"
    return f"write {named}: the module without .py, found from the folder that vlarl is started in or on PYTHONPATH"


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """The message for an unknown name: the nearest known name, and all of them."""
    match = nearest(name, known)
    hint = f"; did you mean '{match}'? Known: " if match else "; known: "
    return f"unknown {kind}{hint}{', '.join(known)}"
