"""The environment contracts: what the collector calls, and what a simulator has to implement.

    Collector ── EnvPool ─┬─ TabletopPool           all slots in one process, as arrays
                          ├─ PromptPool             prompts of a dataset: an episode is one text
                          ├─ GymVectorPool          all slots in one batched Gymnasium environment
                          └─ WorkerPool ── SingleEnv   a process for each slot (LIBERO, Meta-World, Gymnasium)

A pool holds `num_envs` slots. A slot is reset to a task and then runs chunks of actions until its episode ends.
The implementation hides the conventions of its simulator (image orientation, gripper sign, quaternion order).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from vlarl.errors import VlarlError
from vlarl.types import Action, ChunkOutcome, FloatArray, Observation, Task, TaskKey, UInt8Array

Actions = Sequence[Action] | FloatArray
"""One action for each slot: chunks [K, D], in a list or as an array [len(slots), K, D], or texts."""

RewardMode = Literal["sparse", "dense"]
"""The reward that an environment assigns: 1 at success, or its own measure of progress."""


@dataclass(frozen=True)
class TaskSpec:
    """One task of a suite."""

    task_id: int
    instruction: str
    max_steps: int


@dataclass(frozen=True)
class DataFile:
    """A file of the user's rows, and what tells its content from another's."""

    name: str
    rows: int
    digest: str


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
    first_fresh_state: int | None = None  # every index from here on is a different state, for demonstrations
    in_epochs: bool = False  # states are samples of a dataset: training takes each once an epoch, in a shuffled order
    repeats: tuple[float, ...] = ()  # how often an epoch has each of train_states; empty: once
    data: tuple[DataFile, ...] = ()  # the files that the states are rows of, where they are the user's
    num_dropped: int = 0  # states that were left out of these lists, as their prompts are too long
    also: tuple[SuiteSpec, ...] = ()  # suites that the same pool runs beside this one, of the same robot

    @property
    def suites(self) -> tuple[SuiteSpec, ...]:
        """This suite, and those beside it."""
        return (self, *self.also)

    def of(self, suite: str) -> SuiteSpec:
        """The suite of this name; ValueError where it is none of them."""
        for each in self.suites:
            if each.name == suite:
                return each
        raise ValueError(f"this pool runs {', '.join(each.name for each in self.suites)}, but the task is of {suite}")


def united(specs: Sequence[SuiteSpec]) -> SuiteSpec:
    """One or several suites as the description of a pool that runs all of them."""
    return replace(specs[0], also=tuple(specs[1:]))


@dataclass(frozen=True)
class Record:
    """The slots of which a call returns more than what the policy sees next."""

    frames: frozenset[int] = frozenset()  # a large frame after each step, for videos
    steps: frozenset[int] = frozenset()  # the observation after each step, for datasets

    def of(self, slots: Mapping[int, int]) -> Record:
        """The same of these slots alone, by their indices elsewhere."""
        frames, steps = (frozenset(slots[s] for s in each if s in slots) for each in (self.frames, self.steps))
        return Record(frames, steps)


NOTHING = Record()


class EnvPool(Protocol):
    """Parallel environments of one suite, or of several of the same robot: any slot runs any task of them.

    `send_reset` and `send_chunk` return at once; `receive` returns the outcomes of slots that are ready. `reset` and
    `step_chunk` do both and wait. The same task and actions give the same episode, in any slot.
    """

    spec: SuiteSpec
    num_envs: int
    lockstep: bool  # all slots finish together, and must be sent their chunks together

    @property
    def num_cores(self) -> int | None:
        """Cores that the slots share, where each of them runs by itself; None: they are stepped together."""
        ...

    @property
    def busy_s(self) -> float | None:
        """Seconds that all slots together have spent on requests so far; None: not known."""
        ...

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: Record = NOTHING) -> None:
        """Start each task in its slot; `record.frames` are the slots whose first frame is returned, too."""
        ...

    def send_chunk(self, slots: Sequence[int], actions: Actions, record: Record = NOTHING) -> None:
        """Run one chunk [len(slots), K, D] in each slot, stopping at a slot's first end; return what `record` says."""
        ...

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        """Outcomes of slots that were sent something, by slot: one at least, all of them from a lock-step pool.

        A reset's outcome has no executed step. `error` is set if the simulator failed; the slot can be reset again.
        """
        ...

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        """Start each task in its slot and return the first observations."""
        ...

    def step_chunk(self, slots: Sequence[int], actions: Actions, record: Record = NOTHING) -> list[ChunkOutcome]:
        """Run one chunk in each slot as `send_chunk` does, and wait for all of them."""
        ...

    def frame(self, slot: int) -> UInt8Array:
        """A large image [H, W, 3] of the slot's current state, for videos."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class LockstepPool:
    """The asynchronous half of `EnvPool` for pools that run all slots at once: outcomes are kept until received."""

    lockstep = True
    num_cores: int | None = None
    busy_s: float | None = None

    def __init__(self) -> None:
        self._outcomes: list[tuple[int, ChunkOutcome]] = []

    def send_reset(self: _HasOutcomes, slots: Sequence[int], tasks: Sequence[Task], record: Record = NOTHING) -> None:
        """Start each task in its slot; `record.frames` are the slots whose first frame is returned, too."""
        observations = self.reset(slots, tasks)
        for slot, observation in zip(slots, observations, strict=True):
            self._outcomes.append((slot, started(observation, (self.frame(slot),) if slot in record.frames else ())))

    def send_chunk(self: _HasOutcomes, slots: Sequence[int], actions: Actions, record: Record = NOTHING) -> None:
        """Run one chunk in each slot, stopping a slot at its first end; return what `record` says."""
        self._outcomes += zip(slots, self.step_chunk(slots, actions, record), strict=True)

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        """All outcomes, by slot."""
        outcomes, self._outcomes = sorted(self._outcomes, key=lambda each: each[0]), []
        return outcomes


class AsyncPool:
    """The synchronous half of `EnvPool`, for pools whose slots finish one by one."""

    num_cores: int | None = None
    busy_s: float | None = None

    def reset(self: _Receiving, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        """Start each task in its slot and return the first observations."""
        self.send_reset(slots, tasks)
        outcomes = self.receive_all(slots)
        for slot, outcome in zip(slots, outcomes, strict=True):
            if outcome.error is not None:
                raise VlarlError(f"{self.spec.name} can't be started in slot {slot}: {outcome.error}")
        return [outcome.observation for outcome in outcomes]

    def step_chunk(
        self: _Receiving, slots: Sequence[int], actions: Actions, record: Record = NOTHING
    ) -> list[ChunkOutcome]:
        """Run one chunk in each slot and wait for all of them."""
        self.send_chunk(slots, actions, record)
        return self.receive_all(slots)


class _Receiving(EnvPool, Protocol):
    def receive_all(self, slots: Sequence[int]) -> list[ChunkOutcome]: ...


class _HasOutcomes(EnvPool, Protocol):
    _outcomes: list[tuple[int, ChunkOutcome]]


def started(observation: Observation, frames: tuple[UInt8Array, ...] = (), error: str | None = None) -> ChunkOutcome:
    """The outcome of a reset: nothing has been executed yet."""
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


def as_chunks(actions: Actions, num_slots: int, action_dim: int) -> FloatArray:
    """[len(slots), K, D] the actions of all slots; ValueError for another shape, and for texts."""
    chunks = np.asarray(actions, dtype=np.float32)
    if chunks.ndim != 3 or chunks.shape[0] != num_slots or chunks.shape[2] != action_dim:
        raise ValueError(f"actions must be [{num_slots}, K, {action_dim}], not {list(chunks.shape)}")
    return chunks


def fitting(waiting: Sequence[Task], own: TaskKey | None, taken: Collection[TaskKey | None]) -> int:
    """Index of the waiting task that a free slot should take: changing the task of a simulator can cost seconds.

    One of the task that the slot ran last (`own`), else the first that no other slot runs, else the first.
    """
    fresh = 0
    for index in range(len(waiting) - 1, -1, -1):
        if waiting[index].key not in taken:
            fresh = index
    return next((index for index, task in enumerate(waiting) if task.key == own), fresh)


@dataclass(frozen=True)
class StepOutcome:
    """One step of one environment."""

    reward: float
    terminated: bool  # the task ended here, by success or failure
    truncated: bool  # the environment's own time limit; the pool applies that of the suite
    success: bool


class SingleEnv(Protocol):
    """One environment, run by a process of its own (`envs/env_process.py`). It renders on demand only."""

    def reset(self, task: Task) -> None:
        """Start the task's episode. Everything random about it follows from the task."""
        ...

    def step(self, action: FloatArray) -> StepOutcome:
        """Apply one action [D] of the policy, in the suite's units, without rendering."""
        ...

    def observe(self) -> Observation:
        """The current images and proprio; renders the policy's cameras."""
        ...

    def frame(self) -> UInt8Array:
        """An image [H, W, 3] of the current state, for videos."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class Expert(Protocol):
    """Plays episodes of one environment from its privileged state: positions, contacts, goals."""

    def reset(self) -> None:
        """Plan for the episode that the environment has just started."""
        ...

    def act(self) -> FloatArray:
        """The next action [D], in the policy's convention."""
        ...


@dataclass(frozen=True)
class ExpertFlaws:
    """How often demonstrations fail, how noisy their motions are, and how much of the time they stand still."""

    close_high: float = 0.0  # probability of closing the gripper too high above the object
    release_early: float = 0.0  # probability of letting go too early
    action_noise: float = 0.0  # std of the Gaussian noise on executed motions
    hesitation: float = 0.0  # fraction of the time that a simulator's expert pauses

    def mistakes(self, seed: int) -> Mistakes:
        """The mistakes of the episode with this seed."""
        rng = np.random.default_rng([seed, 1])
        high, early = bool(rng.random() < self.close_high), bool(rng.random() < self.release_early)
        return Mistakes(high, early, int(rng.integers(2**31)))


@dataclass(frozen=True)
class Mistakes:
    """What an expert does wrong in one episode, on purpose; closing too high comes before letting go too early."""

    closes_high: bool
    releases_early: bool
    goal: int  # of several goals, the one that goes wrong: this index modulo their count

    def __bool__(self) -> bool:
        return self.closes_high or self.releases_early


@runtime_checkable
class FallibleExpert(Expert, Protocol):
    """An expert that can make mistakes."""

    def err(self, mistakes: Mistakes) -> None:
        """Make these mistakes in the episode that was planned by `reset`, and stand still after the first."""
        ...

    @property
    def finished(self) -> bool:
        """Whether it stands still for the rest of the episode."""
        ...


@dataclass(frozen=True)
class Demonstration:
    """An episode that an expert played."""

    task: Task
    instruction: str
    images: UInt8Array  # [T, I, H, W, 3] before each action
    proprio: FloatArray  # [T, P]
    actions: FloatArray  # [T, D] as the expert intended them; those executed may have noise added
    rewards: FloatArray  # [T]
    success: bool

    @classmethod
    def of_steps(
        cls,
        task: Task,
        seen: Sequence[Observation],
        actions: Sequence[FloatArray],
        rewards: Sequence[float],
        success: bool,
    ) -> Demonstration:
        """The episode of T observations, each with the action [D] and the reward that follow it."""
        return cls(
            task=task,
            instruction=seen[0].instruction,
            images=np.stack([observation.images for observation in seen]),
            proprio=np.stack([observation.proprio for observation in seen]),
            actions=np.stack(actions),
            rewards=np.array(rewards, np.float32),
            success=success,
        )


class EnvFactory(Protocol):
    """Makes an environment in its process: picklable, and cheap until `build`."""

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
        """The scripted expert for an environment of this factory; UsageError if there is none."""
        ...
