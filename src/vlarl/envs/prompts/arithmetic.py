"""The suite `prompts_arithmetic`: small sums in words and digits, without images."""

from __future__ import annotations

from vlarl.envs.prompts.source import OnError, builtin_spec, one_turn
from vlarl.solutions import Match
from vlarl.types import Prompt

SUITE = "prompts_arithmetic"
KINDS = ("add", "subtract", "multiply", "compare")
INSTRUCTIONS = ("add two integers", "subtract an integer", "multiply two integers", "say which integer is larger")
SIDE = 20  # both operands are 0 to 19
STRIDE, OFFSET = 173, 57  # index -> pair is one to one, as STRIDE has no factor in common with SIDE²; looks random


class ArithmeticPrompts:
    """Every pair of operands occurs at one index only, so held-out pairs are never trained on."""

    match: Match = "exact"
    on_error: OnError = "stop"

    def __init__(self) -> None:
        self.spec = builtin_spec(SUITE, INSTRUCTIONS)

    def prompt(self, task_id: int, state: int) -> Prompt:
        """The prompt of a kind, from its index."""
        a, b = operands(state)
        kind = KINDS[task_id]
        text, solution = {
            "add": (f"What is {a} plus {b}?", f"{a + b}"),
            "subtract": (f"What is {a + b} minus {b}?", f"{a}"),
            "multiply": (f"What is {a} times {b}?", f"{a * b}"),
            "compare": (f"Is {a} larger than {b}?", "yes" if a > b else "no"),
        }[kind]
        return one_turn(text, {"solution": solution, "kind": kind, "data_source": f"{SUITE}/{kind}"})


def operands(state: int) -> tuple[int, int]:
    """The pair of an index below SIDE²."""
    if not 0 <= state < SIDE * SIDE:
        raise ValueError(f"{SUITE} has states 0 to {SIDE * SIDE - 1}, not {state}")
    return divmod((STRIDE * state + OFFSET) % (SIDE * SIDE), SIDE)
