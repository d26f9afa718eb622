"""The suite `prompts_arithmetic`: sums and comparisons of integers below 110, without images."""

from __future__ import annotations

import math

from vlarl.envs.prompts.source import OnError, builtin_spec, one_turn
from vlarl.solutions import Match
from vlarl.types import Prompt

SUITE = "prompts_arithmetic"
KINDS = ("add", "subtract", "largest", "compare")
INSTRUCTIONS = ("add two integers", "subtract an integer", "name the largest integer", "say which integer is larger")
STRIDE, OFFSET = 6173, 57  # STRIDE has no factor in common with 10, so that index -> operands is one to one
MOST = 1000  # states: pairs of an integer below 100 and a digit


class ArithmeticPrompts:
    """Every choice of operands occurs at one index only, so held-out ones are never trained on."""

    match: Match = "exact"
    on_error: OnError = "stop"

    def __init__(self) -> None:
        self.spec = builtin_spec(SUITE, INSTRUCTIONS)

    def prompt(self, task_id: int, state: int) -> Prompt:
        """The prompt of a kind, from its index."""
        kind = KINDS[task_id]
        text, solution = _MAKERS[kind](state)
        return one_turn(text, {"solution": solution, "kind": kind, "data_source": f"{SUITE}/{kind}"})


def operands(state: int, *sides: int) -> list[int]:
    """Integers below `sides`, which are powers of 10; another choice for each index."""
    if not 0 <= state < MOST:
        raise ValueError(f"{SUITE} has states 0 to {MOST - 1}, not {state}")
    rest = (STRIDE * state + OFFSET) % math.prod(sides)
    found = []
    for side in sides:
        rest, operand = divmod(rest, side)
        found.append(operand)
    return found


def _add(state: int) -> tuple[str, str]:
    a, b = operands(state, 100, 10)
    return f"What is {a} plus {b}?", f"{a + b}"


def _subtract(state: int) -> tuple[str, str]:
    a, b = operands(state, 100, 10)
    return f"What is {a + b} minus {b}?", f"{a}"


def _largest(state: int) -> tuple[str, str]:
    a, b, c = operands(state, 100, 100, 100)
    return f"Which is the largest of {a}, {b} and {c}?", f"{max(a, b, c)}"


def _compare(state: int) -> tuple[str, str]:
    a, b = operands(state, 100, 100)
    return f"Is {a} larger than {b}?", "yes" if a > b else "no"


_MAKERS = {"add": _add, "subtract": _subtract, "largest": _largest, "compare": _compare}
