"""The subject of a check, and its findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vlarl.envs.base import EnvPool, Expert, SingleEnv, StepOutcome, SuiteSpec
from vlarl.types import FloatArray, Observation, Task, UInt8Array


@dataclass(frozen=True)
class Finding:
    """The result of one check, and how to fix what it found."""

    kind: Literal["passed", "breach", "note"]
    text: str
    remedy: str = ""


Findings = Iterator[Finding]


@dataclass(frozen=True)
class Subject:
    """The environment under test, and what it promises."""

    env: SingleEnv
    spec: SuiteSpec
    image_shape: tuple[int, int, int, int]
    twin: SingleEnv | None = None  # the same environment in another process, or another slot of its pool
    expert: Expert | None = None

    def task(self, state: int = 0, seed: int = 1) -> Task:
        """The first task, from one of the training states."""
        states = self.spec.train_states
        return Task(self.spec.name, 0, states[state % len(states)], seed)

    def actions(self, count: int, seed: int = 0) -> FloatArray:
        """[count, D] random actions, the same ones each time."""
        return np.random.default_rng(seed).uniform(-1, 1, (count, self.spec.action_dim)).astype(np.float32)


def passed(text: str) -> Finding:
    """A check that passed."""
    return Finding("passed", text)


def breach(text: str, remedy: str) -> Finding:
    """A breach of the contract."""
    return Finding("breach", text, remedy)


def note(text: str) -> Finding:
    """Something for the reader to know or to look at."""
    return Finding("note", text)


class SlotEnv:
    """One slot of a pool as an environment by itself, so that pools can be checked too. The pool's owner closes it."""

    def __init__(self, pool: EnvPool, slot: int) -> None:
        self._pool, self._slot = pool, slot
        self._seen: Observation | None = None

    def reset(self, task: Task) -> None:
        """Start the task in the slot."""
        (self._seen,) = self._pool.reset([self._slot], [task])

    def step(self, action: FloatArray) -> StepOutcome:
        """A chunk of one action; where the pool takes texts, always the same one."""
        is_text = self._pool.spec.action_dim == 0
        (outcome,) = self._pool.step_chunk([self._slot], ["yes"] if is_text else action[None, None])
        if outcome.error is not None:
            raise RuntimeError(outcome.error)
        self._seen = outcome.observation
        return StepOutcome(float(outcome.rewards[0]), outcome.terminated, outcome.truncated, outcome.success)

    def observe(self) -> Observation:
        """The last observation of the pool."""
        if self._seen is None:
            raise RuntimeError("nothing to see: reset the environment first")
        return self._seen

    def frame(self) -> UInt8Array:
        """An image for videos."""
        return self._pool.frame(self._slot)

    def close(self) -> None:
        """Nothing: the pool is closed by its owner."""
