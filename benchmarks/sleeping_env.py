"""Simulators that sleep instead of computing, for benchmarks/overlap.py: their processes import this module."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlarl.envs.base import Expert, SingleEnv, StepOutcome, SuiteSpec, TaskSpec
from vlarl.errors import UsageError
from vlarl.types import FloatArray, Observation, Task, UInt8Array

CHUNK = 8  # steps
EPISODE = 6  # chunks


class SleepingEnv:
    """Steps take a core for a while; the length of a step varies with the seed of the episode."""

    def __init__(self, tokens: Path, step_s: float, variation: float) -> None:
        self._tokens = os.open(tokens, os.O_RDWR)
        self._step_s, self._variation = step_s, variation

    def reset(self, task: Task) -> None:
        """Begin an episode."""
        self._rng = np.random.default_rng(task.seed)

    def step(self, action: FloatArray) -> StepOutcome:
        """Hold a core."""
        token = os.read(self._tokens, 1)
        time.sleep(self._step_s * self._rng.uniform(1 - self._variation, 1 + self._variation))
        os.write(self._tokens, token)
        return StepOutcome(0.0, False, False, False)

    def observe(self) -> Observation:
        """A blank image."""
        return Observation(np.zeros((1, 2, 2, 3), np.uint8), np.zeros(8, np.float32), "")

    def frame(self) -> UInt8Array:
        """A blank image."""
        return np.zeros((2, 2, 3), np.uint8)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._tokens)


@dataclass(frozen=True)
class SleepingFactory:
    """Makes the environments."""

    tokens: Path
    step_s: float
    variation: float

    spec = SuiteSpec("sleeping", (TaskSpec(0, "", CHUNK * EPISODE),), (0,), (1,), (1,))
    image_shape = (1, 2, 2, 3)

    def variables(self, slot: int) -> Mapping[str, str]:
        """Nothing is configured."""
        return {}

    def build(self) -> SingleEnv:
        """The environment."""
        return SleepingEnv(self.tokens, self.step_s, self.variation)

    def build_expert(self, env: SingleEnv) -> Expert:
        """There is none."""
        raise UsageError("it has no expert")
