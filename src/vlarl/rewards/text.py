"""Rewards for texts by rule: the solution, the form and the length of a response."""

from __future__ import annotations

from collections.abc import Callable

from vlarl.errors import VlarlError
from vlarl.rewards.base import Reward, reward_at_end
from vlarl.rewards.rules import format_rule, length_rule
from vlarl.solutions import Match, find_solution, matches
from vlarl.types import Prompt, Response, Trajectory

BUFFER_FRACTION = 5  # where reward.overlong_buffer is null: a fifth of reward.max_tokens


def response_of(trajectory: Trajectory) -> Response:
    """The response of an episode; VlarlError for an episode of a robot."""
    response = trajectory.response
    if response is None:
        raise VlarlError(
            f"episode {trajectory.task.episode_id} has no text: rewards for texts need a suite of prompts "
            "(env.suite prompts or prompts_*)."
        )
    return response


def solution_of(prompt: Prompt) -> str:
    """The solution of a prompt; VlarlError where its row has none."""
    found = find_solution(prompt.columns)
    if found is None:
        there = ", ".join(prompt.columns) or "none"
        raise VlarlError(
            f"the prompt {prompt.text[:80]!r} has no solution; name its column with prompts.solution_column "
            f"(its columns: {there})."
        )
    return found


class TextReward(Reward):
    """The value of a response by one rule."""

    reads_images = False

    def __init__(self, rule: Callable[[Response], float]) -> None:
        self.rule = rule

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Assign the value of the text."""
        return reward_at_end(trajectory, self.rule(response_of(trajectory)))


def match_reward(match: Match) -> TextReward:
    """1 for a response that gives the solution, else 0."""
    return TextReward(lambda response: float(matches(response.text, solution_of(response.prompt), match)))


def format_reward(pattern: str) -> TextReward:
    """1 for a response that the regular expression matches as a whole, else 0."""
    return TextReward(lambda response: format_rule(response.text, pattern, 1.0, 0.0))


def length_reward(limit: int, penalty: float) -> TextReward:
    """A penalty for each token above a limit."""
    return TextReward(lambda response: length_rule(response.num_tokens, limit, penalty))


def overlong_reward(max_tokens: int, buffer: int | None) -> TextReward:
    """DAPO's soft punishment of overlong responses."""
    ramp = buffer or max(1, max_tokens // BUFFER_FRACTION)
    return TextReward(lambda response: overlong_rule(response.num_tokens, max_tokens, ramp))


def overlong_rule(length: int, max_tokens: int, buffer: int) -> float:
    """0 up to `max_tokens - buffer` tokens, from there down to -1 at `max_tokens`, and -1 beyond (arXiv:2503.14476).

    >>> [overlong_rule(length, 100, 20) for length in (80, 90, 100, 500)]
    [0.0, -0.5, -1.0, -1.0]
    """
    return -min(max(length - (max_tokens - buffer), 0) / buffer, 1.0) + 0.0
