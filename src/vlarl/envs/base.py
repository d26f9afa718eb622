"""The environment contracts: what the collector asks of a simulator, and what a simulator has to bring for it.

    Collector ── EnvPool ─┬─ TabletopPool           all slots in one process, as arrays
                          ├─ GymVectorPool          all slots in one batched Gymnasium environment
                          └─ WorkerPool ── SingleEnv   a process for each slot (LIBERO, Meta-World, Gymnasium)

A pool holds `num_envs` slots. A slot is reset to a task and then runs chunks of actions until its episode ends.
Conventions of the simulator (image orientation, gripper sign, quaternion order) end inside the implementation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from vlarl.errors import VlarlError
from vlarl.types import ChunkOutcome, FloatArray, Observation, Task, UInt8Array

RewardMode = Literal["sparse", "dense"]
"""What an environment pays: 1 at success, or its own measure of progress."""


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
    benchmark_states: tuple[int, ...]  # indices that published results are measured on
    action_dim: int = 7
    proprio_dim: int = 8
    first_fresh_state: int | None = None  # from here on every index is another state, for demonstrations


class EnvPool(Protocol):
    """Parallel environments of one suite.

    `send_reset` and `send_chunk` return at once; `receive` brings the answers of slots that are ready. `reset` and
    `step_chunk` do both and wait. The same task and actions give the same episode, in any slot.
    """

    spec: SuiteSpec
    num_envs: int
    lockstep: bool  # all slots answer together, and are to be sent their chunks together

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: frozenset[int] = frozenset()) -> None:
        """Start each task in its slot; film the named slots' first pictures."""
        ...

    def send_chunk(self, slots: Sequence[int], actions: FloatArray, record: frozenset[int] = frozenset()) -> None:
        """Run one chunk [len(slots), K, D] in each slot, stopping a slot at its first end; film the named slots."""
        ...

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        """Answers of slots that were sent something, by slot: one at least, all of them from a lock-step pool.

        A reset answers with no executed step. `error` is set where the simulator failed; the slot can be reset again.
        """
        ...

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        """Start each task in its slot and return the first observations."""
        ...

    def step_chunk(
        self, slots: Sequence[int], actions: FloatArray, record: frozenset[int] = frozenset()
    ) -> list[ChunkOutcome]:
        """Run one chunk in each slot as `send_chunk` does, and wait for all of them."""
        ...

    def frame(self, slot: int) -> UInt8Array:
        """A large picture [H, W, 3] of a slot as it is now, for videos."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class LockstepPool:
    """The asynchronous half of `EnvPool` for pools that run all their slots at once: answers wait to be received."""

    lockstep = True

    def __init__(self) -> None:
        self._answers: list[tuple[int, ChunkOutcome]] = []

    def send_reset(
        self: _Answering, slots: Sequence[int], tasks: Sequence[Task], record: frozenset[int] = frozenset()
    ) -> None:
        """Start each task in its slot; film the named slots' first pictures."""
        observations = self.reset(slots, tasks)
        for slot, observation in zip(slots, observations, strict=True):
            self._answers.append((slot, started(observation, (self.frame(slot),) if slot in record else ())))

    def send_chunk(
        self: _Answering, slots: Sequence[int], actions: FloatArray, record: frozenset[int] = frozenset()
    ) -> None:
        """Run one chunk in each slot, stopping a slot at its first end; film the named slots."""
        self._answers += zip(slots, self.step_chunk(slots, actions, record), strict=True)

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        """All answers, by slot."""
        answers, self._answers = sorted(self._answers, key=lambda answer: answer[0]), []
        return answers


class AsyncPool:
    """The half of `EnvPool` that waits, for pools whose slots answer one by one."""

    def reset(self: _Receiving, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        """Start each task in its slot and return the first observations."""
        self.send_reset(slots, tasks)
        outcomes = self.receive_all(slots)
        for slot, outcome in zip(slots, outcomes, strict=True):
            if outcome.error is not None:
                raise VlarlError(f"{self.spec.name} can't be started in slot {slot}: {outcome.error}")
        return [outcome.observation for outcome in outcomes]

    def step_chunk(
        self: _Receiving, slots: Sequence[int], actions: FloatArray, record: frozenset[int] = frozenset()
    ) -> list[ChunkOutcome]:
        """Run one chunk in each slot and wait for all of them."""
        self.send_chunk(slots, actions, record)
        return self.receive_all(slots)


class _Receiving(EnvPool, Protocol):
    def receive_all(self, slots: Sequence[int]) -> list[ChunkOutcome]: ...


class _Answering(EnvPool, Protocol):
    _answers: list[tuple[int, ChunkOutcome]]


def started(observation: Observation, frames: tuple[UInt8Array, ...] = (), error: str | None = None) -> ChunkOutcome:
    """The answer to a reset: nothing has been executed yet."""
    return ChunkOutcome(
        rewards=np.zeros(0, np.float32),
        num_executed=0,
        terminated=False,
        truncated=False,
        success=False,
        observation=observation,
        frames=frames,
        error=error,
    )


def fitting(waiting: Sequence[Task], own: int | None, taken: Collection[int | None]) -> int:
    """Which of the waiting tasks a free slot should take: changing the task of a simulator can cost seconds.

    One of the task id that the slot has run last (`own`), else the first that no other slot is at, else the first.
    """
    fresh = 0
    for place in range(len(waiting) - 1, -1, -1):
        if waiting[place].task_id not in taken:
            fresh = place
    return next((place for place, task in enumerate(waiting) if task.task_id == own), fresh)


@dataclass(frozen=True)
class StepOutcome:
    """One step of one environment."""

    reward: float
    terminated: bool  # the task ended here, by success or for good
    truncated: bool  # the environment's own time limit; that of the suite is the pool's business
    success: bool


class SingleEnv(Protocol):
    """One environment, run by a process of its own (`envs/worker.py`). It renders when it is asked to, not before."""

    def reset(self, task: Task) -> None:
        """Start the task's episode. Everything random about it follows from the task."""
        ...

    def step(self, action: FloatArray) -> StepOutcome:
        """Apply one action [D] of the policy, in the suite's units; draws nothing."""
        ...

    def observe(self) -> Observation:
        """What the robot sees and feels now; renders the policy's cameras."""
        ...

    def frame(self) -> UInt8Array:
        """A picture [H, W, 3] for videos, as it is now."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class Expert(Protocol):
    """Plays episodes of one environment by what a policy can't see: positions, contacts, goals."""

    def reset(self) -> None:
        """Look at the episode that the environment has just started."""
        ...

    def act(self) -> FloatArray:
        """The next action [D], as a policy would give it."""
        ...


@dataclass(frozen=True)
class Demonstration:
    """An episode that an expert played."""

    task: Task
    instruction: str
    images: UInt8Array  # [T, I, H, W, 3] before each action
    proprio: FloatArray  # [T, P]
    actions: FloatArray  # [T, D] as the expert intended them; what it executed may have been shaken by noise
    rewards: FloatArray  # [T]
    success: bool


class EnvFactory(Protocol):
    """What a process needs to make its environment: picklable, and light until `build`."""

    @property
    def spec(self) -> SuiteSpec:
        """The suite."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int, int]:
        """(I, H, W, 3) of an observation."""
        ...

    def variables(self, slot: int) -> Mapping[str, str]:
        """Environment variables that the process of this slot is started with, such as MUJOCO_GL."""
        ...

    def build(self) -> SingleEnv:
        """The environment; called in its process."""
        ...

    def build_expert(self, env: SingleEnv) -> Expert:
        """The scripted expert of an environment that this factory made; UsageError where there is none."""
        ...
