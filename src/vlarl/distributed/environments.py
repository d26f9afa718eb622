"""Environments as workers of a cluster, behind the contract of one pool.

    Collector ── send_reset, send_chunk ──► PoolGroup ──► environments 0 (slots 0 … 31), environments 1 (32 … 63) …
              ◄── receive ────────────────

Tabletops and batched environments share the slots between a few workers; a simulator has a worker of its own. `receive`
returns as soon as one worker has answered all it was asked, with all such workers: while the engine decides for them,
the others step. A worker that is lost is replaced, and its slots answer with an error: the collector runs those
episodes again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import ray

from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.config.suites import suite_facts
from vlarl.distributed.actor import Question, Worker
from vlarl.envs.base import AsyncPool, EnvFactory, EnvPool, RewardMode, SuiteSpec, started
from vlarl.envs.build import build_factory, build_pool
from vlarl.envs.env_process import Chunk, EnvRunner, Reset
from vlarl.envs.guardian import Guardian
from vlarl.errors import WorkerLostError
from vlarl.types import ChunkOutcome, FloatArray, Observation, Task, UInt8Array


class Environments(Protocol):
    """What a worker runs: some slots, numbered from 0."""

    def spec(self) -> SuiteSpec: ...  # noqa: D102

    def reset(self, slots: list[int], tasks: list[Task], record: frozenset[int]) -> list[ChunkOutcome]: ...  # noqa: D102

    def step(self, slots: list[int], actions: FloatArray, record: frozenset[int]) -> list[ChunkOutcome]: ...  # noqa: D102

    def frame(self, slot: int) -> UInt8Array: ...  # noqa: D102


class PoolPart:
    """Slots of a pool that steps them together."""

    def __init__(self, env: EnvConfig, gym: GymConfig, num_envs: int, image_size: int, reward: RewardMode) -> None:
        self._pool: EnvPool = build_pool(env, gym, num_envs, image_size, reward)

    def spec(self) -> SuiteSpec:
        """The suite."""
        return self._pool.spec

    def reset(self, slots: list[int], tasks: list[Task], record: frozenset[int]) -> list[ChunkOutcome]:
        """Start each task in its slot."""
        self._pool.send_reset(slots, tasks, record)
        return self._in_order(slots)

    def step(self, slots: list[int], actions: FloatArray, record: frozenset[int]) -> list[ChunkOutcome]:
        """Run one chunk in each slot."""
        self._pool.send_chunk(slots, actions, record)
        return self._in_order(slots)

    def frame(self, slot: int) -> UInt8Array:
        """A picture of a slot."""
        return self._pool.frame(slot)

    def _in_order(self, slots: list[int]) -> list[ChunkOutcome]:
        outcomes = dict(self._pool.receive())
        return [outcomes[slot] for slot in slots]


class Simulator:
    """One simulator, in slot 0."""

    def __init__(self, factory: EnvFactory) -> None:
        self._factory = factory
        if gpus := ray.get_gpu_ids():  # it draws on what Ray has given to it, unless env.render_gpu is set
            os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", str(gpus[0]))
        self._runner = EnvRunner(factory)

    def spec(self) -> SuiteSpec:
        """The suite."""
        return self._factory.spec

    def reset(self, slots: list[int], tasks: list[Task], record: frozenset[int]) -> list[ChunkOutcome]:
        """Start the task."""
        return [self._outcome(Reset(tasks[0], bool(record)))]

    def step(self, slots: list[int], actions: FloatArray, record: frozenset[int]) -> list[ChunkOutcome]:
        """Run one chunk."""
        return [self._outcome(Chunk(actions[0], bool(record)))]

    def frame(self, slot: int) -> UInt8Array:
        """A picture of it."""
        return self._runner.env.frame()

    def _outcome(self, message: Reset | Chunk) -> ChunkOutcome:
        return cast(ChunkOutcome, self._runner.handle(message))


@dataclass(frozen=True)
class Share:
    """What one environment worker runs."""

    part: type[PoolPart] | type[Simulator]
    arguments: tuple[Any, ...]
    variables: dict[str, str]  # that its process is started with

    def build(self) -> Environments:
        """The environments; called over there. What they start ends with their worker, and it with the node's Ray."""
        with suppress(PermissionError):  # it leads a session already
            os.setpgid(0, 0)
        guardian = Guardian(owners=[os.getppid()])
        guardian.watch(os.getpgrp())
        os.environ.update(guardian.variables)  # for what the environments start
        return self.part(*self.arguments)


def part_sizes(env: EnvConfig, gym: GymConfig, num_envs: int, num_workers: int) -> list[int]:
    """Slots of each worker: divided evenly, or one simulator each."""
    facts = suite_facts(env, gym)
    if facts is not None and facts.in_processes:
        return [1] * num_envs
    return [len(part) for part in np.array_split(np.arange(num_envs), min(num_workers, num_envs))]


def pool_parts(
    env: EnvConfig, gym: GymConfig, sizes: Sequence[int], image_size: int, reward: RewardMode
) -> list[Share]:
    """What each worker runs: a part of the pool, or a simulator."""
    facts = suite_facts(env, gym)
    if facts is not None and facts.in_processes:
        factory = build_factory(env, gym, image_size, reward)
        return [Share(Simulator, (factory,), dict(factory.variables(slot))) for slot in range(len(sizes))]
    return [Share(PoolPart, (env, gym, size, image_size, reward), {}) for size in sizes]


class PoolGroup(AsyncPool):
    """The environments of all workers as one pool."""

    def __init__(self, workers: Sequence[Worker], num_slots: Sequence[int], lockstep: bool) -> None:
        """`num_slots` of each worker; in lock-step all workers answer together."""
        self.workers = list(workers)
        self.num_envs = sum(num_slots)
        self.lockstep = lockstep
        self.spec: SuiteSpec = workers[0].get(workers[0].ask("spec"))
        self._owner = [index for index, count in enumerate(num_slots) for _ in range(count)]
        self._first = np.cumsum([0, *num_slots[:-1]]).tolist()
        self._asked: dict[int, list[tuple[Question, list[int]]]] = {index: [] for index in range(len(workers))}
        self._last_seen: dict[int, Observation] = {}
        self._gone: dict[int, str] = {}  # slots whose episode ended with their worker, and why
        self._waiting: list[tuple[int, ChunkOutcome]] = []  # answers of such slots

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: frozenset[int] = frozenset()) -> None:
        """Start each task in its slot; film the named slots' first pictures."""
        for index, own in self._by_worker(slots):
            chosen = [tasks[place] for place in own]
            for place in own:
                self._gone.pop(slots[place], None)
            self._ask(index, "reset", [slots[place] for place in own], chosen, record)

    def send_chunk(self, slots: Sequence[int], actions: FloatArray, record: frozenset[int] = frozenset()) -> None:
        """Run one chunk [len(slots), K, D] in each slot, stopping a slot at its first end; film the named slots."""
        self._waiting += [(slot, self._failed(slot, self._gone[slot])) for slot in slots if slot in self._gone]
        kept = [place for place, slot in enumerate(slots) if slot not in self._gone]
        slots, actions = [slots[place] for place in kept], actions[kept]
        for index, own in self._by_worker(slots):
            self._ask(index, "step", [slots[place] for place in own], np.ascontiguousarray(actions[own]), record)

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        """Answers of all workers that have answered everything: one at least, all of them in lock-step."""
        answers, self._waiting = self._waiting, []
        if not answers and not any(self._asked.values()):
            raise RuntimeError("nothing was sent that could be received")
        while any(self._asked.values()) and (self.lockstep or not answers):
            for index in self._ready():
                answers += self._answers(index)
        return sorted(answers, key=lambda answer: answer[0])

    def frame(self, slot: int) -> UInt8Array:
        """A large picture [H, W, 3] of a slot as it is now, for videos."""
        worker = self.workers[self._owner[slot]]
        picture: UInt8Array = worker.get(worker.ask("frame", slot - self._first[self._owner[slot]]))
        return picture

    def close(self) -> None:
        """The workers are the cluster's to end."""

    def _by_worker(self, slots: Sequence[int]) -> list[tuple[int, list[int]]]:
        """For each worker that has some of the slots, their places in the list."""
        places: dict[int, list[int]] = {}
        for place, slot in enumerate(slots):
            places.setdefault(self._owner[slot], []).append(place)
        return sorted(places.items())

    def _ask(self, index: int, method: str, slots: list[int], content: Any, record: frozenset[int]) -> None:
        worker, first = self.workers[index], self._first[index]
        own = [slot - first for slot in slots]
        recorded = frozenset(slot - first for slot in record if self._owner[slot] == index)
        waiting = len(self._asked[index])  # it works on one question after the other
        question = worker.ask(method, own, content, recorded, timeout_s=worker.timeout_s * (1 + waiting))
        self._asked[index].append((question, slots))

    def _ready(self) -> list[int]:
        """Wait until a worker has answered everything, or can't any more; all such workers."""
        last = {asked[-1][0].reference: index for index, asked in self._asked.items() if asked}
        deadline = min(asked[-1][0].deadline for asked in self._asked.values() if asked)
        answered, _ = ray.wait(list(last), num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))
        if answered:  # and those that have answered in the meantime
            answered, _ = ray.wait(list(last), num_returns=len(last), timeout=0)
        now = time.monotonic()
        return [i for ref, i in last.items() if ref in answered or self._asked[i][-1][0].deadline <= now]

    def _answers(self, index: int) -> list[tuple[int, ChunkOutcome]]:
        """What a worker answered; one that is lost is replaced, and all its slots answer with the error."""
        asked, self._asked[index] = self._asked[index], []
        worker = self.workers[index]
        answers: list[tuple[int, ChunkOutcome]] = []
        try:
            for question, slots in asked:
                answers += zip(slots, worker.get(question), strict=True)
        except WorkerLostError as error:
            worker.replace()
            answers = [(slot, self._failed(slot, str(error))) for _, slots in asked for slot in slots]
            self._gone |= {slot: str(error) for slot, owner in enumerate(self._owner) if owner == index}
        self._last_seen |= {slot: outcome.observation for slot, outcome in answers}
        return answers

    def _failed(self, slot: int, reason: str) -> ChunkOutcome:
        nothing = Observation(np.zeros((1, 1, 1, 3), np.uint8), np.zeros(self.spec.proprio_dim, np.float32), "")
        return started(self._last_seen.get(slot, nothing), error=reason)

    def receive_all(self, slots: Sequence[int]) -> list[ChunkOutcome]:
        """The answers of these slots, in their order."""
        outcomes, self._waiting = dict(self._waiting), []
        while any(slot not in outcomes for slot in slots):
            for index in self._ready():
                outcomes |= dict(self._answers(index))
        return [outcomes[slot] for slot in slots]
