"""Compares a response with the solution of its prompt: for the success of an episode, and for rewards."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

Match = Literal["exact", "number", "choice"]

SOLUTION = "solution"
COLUMNS = (SOLUTION, "answer", "ground_truth")
"""Columns that may hold the solution, the first that is there; after them verl's reward_model.ground_truth."""

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_MARKED = re.compile(r"####\s*(.+)")
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?"
)
_CHOICE = re.compile(r"\(([A-Z])\)|\b([A-Z])\b(?:[.):]|\s*$)|(?i:answer|option|choice)(?: is)?:?\s*\(?([A-Z])\b")


def find_solution(columns: Mapping[str, Any]) -> str | None:
    """The solution that a row's columns hold, as text; None where there is none."""
    value = next((columns[name] for name in COLUMNS if columns.get(name) is not None), None)
    if value is None and isinstance(columns.get("reward_model"), Mapping):
        value = columns["reward_model"].get("ground_truth")
    return None if value is None else str(value)


def matches(response: str, solution: str, match: Match) -> bool:
    """Whether a response gives the solution: the same words, the same number, or the same letter of a choice."""
    given, right = final_answer(response), final_answer(solution)
    if match == "exact":
        return normalised(given) == normalised(right)
    if match == "choice":
        wanted = last_choice(right)
        return wanted is not None and last_choice(given) == wanted
    a, b = last_number(given), last_number(right)
    return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def final_answer(text: str) -> str:
    r"""What a text gives as its answer: the last `<answer>…</answer>`, `\boxed{…}` or `#### …`, else all of it.

    >>> final_answer("<think>3 + 4</think> <answer>7</answer>")
    '7'
    """
    for pattern in (_TAGGED, _BOXED, _MARKED):
        if found := pattern.findall(text):
            return str(found[-1]).strip()
    return text.strip()


def normalised(text: str) -> str:
    """A text without case, extra spaces and punctuation around it.

    >>> normalised(" The  Red one. ")
    'the red one'
    """
    return " ".join(text.casefold().split()).strip(" .,;:!?\"'`$*")


def last_number(text: str) -> float | None:
    """The last number of a text, thousands separators and fractions included; None where there is none.

    >>> last_number("about 1,250.5 of 3/4"), last_number("two")
    (0.75, None)
    """
    found = [match for match in _NUMBER.findall(text) if any(c.isdigit() for c in match)]
    if not found:
        return None
    above, _, below = found[-1].replace(",", "").partition("/")
    divisor = float(below) if below else 1.0
    return float(above) / divisor if divisor else None


def last_choice(text: str) -> str | None:
    """The letter that a text chooses: `B`, `(B)`, `B.` or `the answer is B`; None where there is none."""
    if re.fullmatch(r"\W*[A-Za-z]\W*", text):
        return re.sub(r"\W", "", text).upper()
    found = [next(filter(None, groups)) for groups in _CHOICE.findall(text)]
    return found[-1] if found else None
