"""Reward functions for texts as TRL and verl write them, unchanged.

    TRL    f(prompts, completions, completion_ids, <columns>, **kwargs) -> list[float | None]     once for a batch
    verl   compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict     once for a text

`config/reward_module.py` says which of them a function is, by the names of its parameters.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, SupportsFloat

from PIL import Image

from vlarl.config.reward_module import FunctionStyle
from vlarl.deadline import DeadlineError, TimedCaller
from vlarl.errors import VlarlError, describe_error, excerpt
from vlarl.rewards.base import Reward, RewardTimeoutError, reward_at_end
from vlarl.rewards.function import TIMEOUT_S
from vlarl.rewards.text import response_of
from vlarl.solutions import find_solution
from vlarl.types import Prompt, Response, Trajectory

BATCH = 1_000_000  # a rollout in one call: functions may compare its responses, or request scores for all at once
IMAGES = ("image", "images")  # given where a function names them: pixels of a whole rollout take memory
TRL_NAMES = ("prompts", "completions", "completion_ids", *IMAGES)
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


class TextFunctionReward(Reward):
    """A user's function that scores texts; None of it means that the function does not concern a text."""

    batch_size = BATCH

    def __init__(
        self, source: str, function: Callable[..., Any], style: FunctionStyle, timeout_s: float | None = None
    ) -> None:
        """`source` names the function in messages."""
        self.source = source
        self.function = function
        self.style = style
        self.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        parameters = inspect.signature(function).parameters
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._names = frozenset(parameters)
        self.reads_images = not self._names.isdisjoint(IMAGES)
        self._caller = TimedCaller(f"reward {source}")

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Assign the value of one text."""
        return self.score_all([trajectory])[0]

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Assign the value of each text; 0 where the function does not concern it."""
        scored = self.score_some(trajectories)
        return [reward_at_end(t, 0.0) if s is None else s for t, s in zip(trajectories, scored, strict=True)]

    def score_some(self, trajectories: Sequence[Trajectory]) -> list[Trajectory | None]:
        """The same, with None for texts that the function does not concern."""
        call = self._call_trl if self.style == "trl" else self._call_verl
        try:
            values = self._caller.call(lambda: call(trajectories), self.timeout_s)
        except DeadlineError as error:
            limit = f"reward.timeout_s = {self.timeout_s:g} s"
            raise RewardTimeoutError(f"reward.source: {self.source} has not returned within {limit}.") from error
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's code: sys.exit, or an exception that does not derive from Exception
            raise VlarlError(f"reward.source: {self.source} {describe_error(error)}.") from error
        # A value that can't be used is NaN in a batch: its text is then scored by itself, and the others are kept.
        number = self._finite if len(trajectories) == 1 else _number
        return [
            None if value is None else reward_at_end(trajectory, number(value))
            for trajectory, value in zip(trajectories, values, strict=True)
        ]

    def _call_trl(self, trajectories: Sequence[Trajectory]) -> Sequence[Any]:
        responses = [response_of(trajectory) for trajectory in trajectories]
        prompts = [response.prompt for response in responses]
        given: dict[str, Any] = {
            "prompts": [trl_prompt(prompt) for prompt in prompts],
            "completions": [trl_completion(response) for response in responses],
            "completion_ids": [trajectory.transitions[-1].decision.token_ids()[0] for trajectory in trajectories],
        }
        if self.reads_images:  # as TRL gives them
            images = [[Image.fromarray(image) for image in prompt.images] for prompt in prompts]
            both = {"images": images, "image": [each[0] if each else None for each in images]}
            given |= {name: value for name, value in both.items() if name in self._names}
        own = [copy.deepcopy(prompt.columns) for prompt in prompts]  # members of a group have the same prompt
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns if name not in TRL_NAMES)
        given |= {name: [columns.get(name) for columns in own] for name in names}
        chosen = {name: value for name, value in given.items() if self._takes_all or name in self._names}
        values = _awaited(self.function(**chosen))
        if isinstance(values, str | bytes) or not hasattr(values, "__len__") or len(values) != len(responses):
            found = f"{len(values)} values" if hasattr(values, "__len__") else excerpt(repr(values), 200)
            raise VlarlError(
                f"reward.source: {self.source} returned {found} for {len(responses)} completions; it must return a "
                "list with one number, or None, for each."
            )
        return list(values)

    def _call_verl(self, trajectories: Sequence[Trajectory]) -> Sequence[Any]:
        return [_awaited(self.function(**self._verl_arguments(trajectory))) for trajectory in trajectories]

    def _verl_arguments(self, trajectory: Trajectory) -> dict[str, Any]:
        response = response_of(trajectory)
        columns = copy.deepcopy(response.prompt.columns)  # members of a group have the same prompt
        given = {
            "data_source": columns.get("data_source", trajectory.task.suite),
            "solution_str": response.text,
            "ground_truth": verl_ground_truth(columns),
            "extra_info": columns.get("extra_info"),
        }
        return {name: value for name, value in given.items() if self._takes_all or name in self._names}

    def _finite(self, value: Any) -> float:
        number = _number(value)
        if not math.isfinite(number):
            returned = excerpt(repr(value), 200)
            more = ", or None where a text does not concern it" if self.style == "trl" else ""
            raise VlarlError(f"reward.source: {self.source} returned {returned}; it must return a finite number{more}.")
        return number


def trl_prompt(prompt: Prompt) -> str | list[dict[str, Any]]:
    """A prompt as TRL's functions get it: the text, or the messages of a conversation."""
    return copy.deepcopy([dict(message) for message in prompt.messages]) if prompt.conversational else prompt.text


def trl_completion(response: Response) -> str | list[dict[str, str]]:
    """A response as TRL's functions get it: a text, or a conversation of one message."""
    if not response.prompt.conversational:
        return response.text
    return [{"role": "assistant", "content": response.text}]


def verl_ground_truth(columns: Mapping[str, Any]) -> Any:
    """The ground truth as the row has it; the solution where it has none by that name."""
    model = columns.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    return columns.get("ground_truth", find_solution(columns))


def _number(value: Any) -> float:
    """A function's value as a number, NaN for anything else; verl's functions may return a score among other values."""
    score = value.get("score") if isinstance(value, Mapping) else value
    return float(score) if isinstance(score, SupportsFloat) else math.nan


def _awaited(result: Any) -> Any:
    """The result of a function, also of an async one."""
    if not inspect.isawaitable(result):
        return result

    async def wait(pending: Awaitable[Any]) -> Any:
        return await pending

    return asyncio.run(wait(result))
