"""Where prompts come from: a built-in suite that makes them from their index, or the user's data."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from vlarl.config.known import SUITES
from vlarl.config.suites import SuiteStates
from vlarl.envs.base import SuiteSpec, TaskSpec
from vlarl.errors import UsageError
from vlarl.solutions import Match
from vlarl.types import Prompt, UInt8Array

OnError = Literal["stop", "skip"]


class PromptError(UsageError):
    """A prompt can't be used, such as one whose image is corrupt; the message names its file and row."""


class PromptSource(Protocol):
    """The prompts of a suite, each made or decoded when it is used."""

    spec: SuiteSpec
    match: Match  # how a response is compared with the solution
    on_error: OnError  # of a prompt that can't be used: `stop` the run, or `skip` it, which is counted

    def prompt(self, task_id: int, state: int) -> Prompt:
        """The prompt with this index; the same one each time. PromptError where it can't be used."""
        ...


def builtin_spec(suite: str, instructions: tuple[str, ...]) -> SuiteSpec:
    """The description of a built-in suite of prompts."""
    states = SuiteStates.of(SUITES[suite])
    return SuiteSpec(
        name=suite,
        tasks=tuple(TaskSpec(task_id, instruction, 1) for task_id, instruction in enumerate(instructions)),
        train_states=states.train,
        eval_states=states.eval,
        benchmark_states=states.benchmark,
        action_dim=0,
        in_epochs=True,
    )


def one_turn(text: str, columns: dict[str, Any], *images: UInt8Array) -> Prompt:
    """A conversation of one message: images, then the text."""
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    return Prompt(({"role": "user", "content": parts if images else text},), images, columns=columns)
