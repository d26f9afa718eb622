"""Counts with singular and plural nouns, and what episodes are called, for everything that vlarl prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlarl.config.known import is_prompts

_PLURALS = {"process": "processes", "breach": "breaches", "index": "indices", "trajectory": "trajectories"}


def plural(count: int, noun: str) -> str:
    """`episode` for one, `episodes` for any other count."""
    return noun if count == 1 else _PLURALS.get(noun, f"{noun}s")


def counted(count: int, noun: str) -> str:
    """`1 episode`, `2 episodes`, `1,200 steps`."""
    return f"{count:,} {plural(count, noun)}"


@dataclass(frozen=True)
class SuiteWords:
    """What the episodes of a suite and their results are called."""

    success: str  # the fraction of episodes that succeed
    rate: str  # the same, as a noun with an article
    episode: str
    state: str  # what an episode starts from
    reward: str  # the mean of what an episode earns
    speed: str  # what `rollout/env_steps_per_s` counts
    won: str  # of an episode that succeeded
    lost: str  # of one that did not
    length: str  # of an episode, in these
    instruction: str  # what an episode of a task is given


ROBOT_WORDS = SuiteWords(
    success="success",
    rate="success rate",
    episode="episode",
    state="initial state",
    reward="return",
    speed="env steps/s",
    won="won",
    lost="lost",
    length="steps",
    instruction="instruction",
)
PROMPT_WORDS = SuiteWords(
    success="accuracy",
    rate="accuracy",
    episode="response",
    state="prompt",
    reward="reward",
    speed="responses/s",
    won="correct",
    lost="wrong",
    length="tokens",
    instruction="a prompt of the task",
)


def words_of(suite: str) -> SuiteWords:
    """The words for a suite: of robots, or of prompts."""
    return PROMPT_WORDS if is_prompts(suite) else ROBOT_WORDS


def agreement_in_words(found: Mapping[str, float]) -> str:
    """Loss and agreement for people: `accuracy 93.4%, loss 0.201`."""
    shown = {"auc": "AUC {:.3f}", "accuracy": "accuracy {:.1%}", "loss": "loss {:.3f}"}
    return ", ".join(text.format(found[name]) for name, text in shown.items() if name in found)
