"""The environment contract: what the collector asks of a simulator, whatever runs behind it.

A pool holds `num_envs` slots. A slot is reset to a task and then runs chunks of actions until its episode ends.
Conventions of the simulator (image orientation, gripper sign, quaternion order) end inside the implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vlarl.types import ChunkOutcome, FloatArray, Observation, Task, UInt8Array


@dataclass(frozen=True)
class TaskSpec:
    """One task of a suite."""

    task_id: int
    instruction: str
    max_steps: int


@dataclass(frozen=True)
class SuiteSpec:
    """A suite of tasks, its initial states and the part of them kept for evaluation."""

    name: str
    tasks: tuple[TaskSpec, ...]
    train_states: tuple[int, ...]  # indices of initial states used for training
    eval_states: tuple[int, ...]  # indices used for evaluation, disjoint from train_states
    action_dim: int = 7
    proprio_dim: int = 8


class EnvPool(Protocol):
    """Parallel environments of one suite."""

    spec: SuiteSpec
    num_envs: int

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        """Start each task in its slot and return the first observations."""
        ...

    def step_chunk(
        self, slots: Sequence[int], actions: FloatArray, film: frozenset[int] = frozenset()
    ) -> list[ChunkOutcome]:
        """Run one chunk [len(slots), K, D] in each slot, stopping a slot at its first end; film the named slots."""
        ...

    def frame(self, slot: int) -> UInt8Array:
        """A large picture [H, W, 3] of a slot as it is now, for videos."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
