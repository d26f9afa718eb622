"""An environment that costs nothing: slots show noise, and every other episode of a group succeeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlarl.envs.base import NOTHING, Actions, LockstepPool, Record, SuiteSpec, TaskSpec, as_chunks
from vlarl.policies.base import Policy
from vlarl.policies.bench_model import BenchModel
from vlarl.types import ChunkOutcome, Observation, Task, UInt8Array

NUM_OBSERVATIONS = 8  # made once, shown in turn
SUITE = "noise"


class NoisePool(LockstepPool):
    """Episodes of a fixed number of decisions."""

    def __init__(self, policy: Policy, model: BenchModel, num_envs: int, episode_decisions: int) -> None:
        super().__init__()
        self._seen = [model.observation(seed) for seed in range(NUM_OBSERVATIONS)]
        steps = policy.num_steps * episode_decisions
        task = TaskSpec(0, self._seen[0].instruction, max_steps=steps)
        self.spec = SuiteSpec(SUITE, (task,), (0,), (1,), (1,), policy.action_dim, len(self._seen[0].proprio))
        self.num_envs = num_envs
        self._episode_decisions = episode_decisions
        self._tasks: dict[int, Task] = {}
        self._done: dict[int, int] = {}

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        """Begin an episode in each slot."""
        for slot, task in zip(slots, tasks, strict=True):
            self._tasks[slot], self._done[slot] = task, 0
        return [self._observe(slot) for slot in slots]

    def step_chunk(self, slots: Sequence[int], actions: Actions, record: Record = NOTHING) -> list[ChunkOutcome]:
        """Take each chunk as executed; the last one of an episode ends it."""
        chunks = as_chunks(actions, len(slots), self.spec.action_dim)
        return [self._outcome(slot, chunks.shape[1]) for slot in slots]

    def frame(self, slot: int) -> UInt8Array:
        """The image of the slot."""
        image: UInt8Array = self._observe(slot).images[0]
        return image

    def close(self) -> None:
        """There is nothing to release."""

    def _outcome(self, slot: int, num_steps: int) -> ChunkOutcome:
        self._done[slot] += 1
        ends = self._done[slot] == self._episode_decisions
        success = ends and self._tasks[slot].member % 2 == 0
        rewards = np.zeros(num_steps, np.float32)
        rewards[-1] = float(success)
        return ChunkOutcome(
            rewards=rewards,
            num_executed=num_steps,
            terminated=success,
            truncated=ends and not success,
            success=success,
            observation=self._observe(slot),
        )

    def _observe(self, slot: int) -> Observation:
        return self._seen[(slot + self._done[slot]) % NUM_OBSERVATIONS]
