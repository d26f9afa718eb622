"""Environments as workers of a cluster, behind the contract of one pool.

    Collector ── send_reset, send_chunk ──► PoolGroup ──► environments 0 (slots 0 … 31), environments 1 (32 … 63) …
              ◄── receive ────────────────            ◄── outcomes without pixels, and names of what stays there

A worker lets the policy's own processor read what its environments show (reading.py). The inputs stay in the object
store of its machine, and so do images that are read later; the driver gets their names (stored_rows.py).

Tabletops and batched environments share a few workers; each simulator has a worker of its own. `receive` returns as
soon as one worker has finished all its calls, with the outcomes of all such workers: while the engine decides for them,
the others step. A worker that is lost is replaced in a thread, and its slots return an error at once: the collector
retries those episodes. Calls to a worker that is being replaced wait for it; the others are served meanwhile.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import ray

from vlarl.config.schema import EnvConfig, GymConfig, PromptsConfig
from vlarl.config.suites import suite_facts
from vlarl.distributed.actor import Request, Worker, replace_later
from vlarl.distributed.reading import PIECE_BYTES, BesideReader, Environments, Reading, Seen
from vlarl.distributed.store_size import Machine, RowBytes, machines_of
from vlarl.envs.base import (
    NOTHING,
    Actions,
    AsyncPool,
    EnvFactory,
    EnvPool,
    Record,
    RewardMode,
    SuiteSpec,
    as_chunks,
    started,
)
from vlarl.envs.build import NO_DATA, build_factory, build_pool
from vlarl.envs.env_process import Chunk, EnvRunner, Reset
from vlarl.envs.guardian import Guardian
from vlarl.errors import WorkerLostError
from vlarl.types import Action, ChunkOutcome, Observation, Task, UInt8Array

POLL_S = 0.1  # how often to look for workers that are ready again, while others run


class PoolPart:
    """Slots of a pool that steps them together."""

    def __init__(
        self,
        env: EnvConfig,
        gym: GymConfig,
        num_envs: int,
        image_size: int,
        reward: RewardMode,
        prompts: PromptsConfig = NO_DATA,
    ) -> None:
        self._pool: EnvPool = build_pool(env, gym, num_envs, image_size, reward, prompts)

    def spec(self) -> SuiteSpec:
        """The suite."""
        return self._pool.spec

    def reset(self, slots: list[int], tasks: list[Task], record: Record) -> list[ChunkOutcome]:
        """Start each task in its slot."""
        self._pool.send_reset(slots, tasks, record)
        return self._in_order(slots)

    def step(self, slots: list[int], actions: Actions, record: Record) -> list[ChunkOutcome]:
        """Run one chunk in each slot."""
        self._pool.send_chunk(slots, actions, record)
        return self._in_order(slots)

    def frame(self, slot: int) -> UInt8Array:
        """A frame of a slot."""
        return self._pool.frame(slot)

    def _in_order(self, slots: list[int]) -> list[ChunkOutcome]:
        outcomes = dict(self._pool.receive())
        return [outcomes[slot] for slot in slots]


class Simulator:
    """One simulator, in slot 0."""

    def __init__(self, factory: EnvFactory) -> None:
        self._factory = factory
        if gpus := ray.get_gpu_ids():  # it renders on the GPU that Ray assigned to it, unless env.render_gpu is set
            os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", str(gpus[0]))
        self._runner = EnvRunner(factory)

    def spec(self) -> SuiteSpec:
        """The suite."""
        return self._factory.spec

    def reset(self, slots: list[int], tasks: list[Task], record: Record) -> list[ChunkOutcome]:
        """Start the task."""
        return [self._outcome(Reset(tasks[0], bool(record.frames)))]

    def step(self, slots: list[int], actions: Actions, record: Record) -> list[ChunkOutcome]:
        """Run one chunk."""
        chunk = as_chunks(actions, 1, self._factory.spec.action_dim)[0]
        return [self._outcome(Chunk(chunk, bool(record.frames), bool(record.steps)))]

    def frame(self, slot: int) -> UInt8Array:
        """A frame of it."""
        return self._runner.env.frame()

    def _outcome(self, message: Reset | Chunk) -> ChunkOutcome:
        return cast(ChunkOutcome, self._runner.handle(message))


@dataclass(frozen=True)
class EnvWorkerSpec:
    """What one environment worker runs."""

    part: type[PoolPart] | type[Simulator]
    arguments: tuple[Any, ...]
    variables: dict[str, str]  # environment variables of its process
    reading: Reading | None = None  # None: observations are returned as they are

    def build(self) -> Environments | BesideReader:
        """The environments, built in the worker's process. What they start ends with it, and it with the node's Ray."""
        with suppress(PermissionError):  # it leads a session already
            os.setpgid(0, 0)
        guardian = Guardian(owners=[os.getppid()])
        guardian.watch(os.getpgrp())
        os.environ.update(guardian.variables)  # for processes that the environments start
        environments = self.part(*self.arguments)
        return environments if self.reading is None else BesideReader(environments, self.reading)


def part_sizes(env: EnvConfig, gym: GymConfig, num_envs: int, num_workers: int) -> list[int]:
    """Slots of each worker: divided evenly, or one simulator each."""
    facts = suite_facts(env, gym)
    if facts is not None and facts.in_processes:
        return [1] * num_envs
    return [len(part) for part in np.array_split(np.arange(num_envs), min(num_workers, num_envs))]


def pool_parts(
    env: EnvConfig,
    gym: GymConfig,
    sizes: Sequence[int],
    image_size: int,
    reward: RewardMode,
    prompts: PromptsConfig = NO_DATA,
    reading: Reading | None = None,
) -> list[EnvWorkerSpec]:
    """What each worker runs: a part of the pool, or a simulator."""
    facts = suite_facts(env, gym)
    if facts is not None and facts.in_processes:
        factory = build_factory(env, gym, image_size, reward)
        slots = range(len(sizes))
        return [EnvWorkerSpec(Simulator, (factory,), dict(factory.variables(slot)), reading) for slot in slots]
    return [EnvWorkerSpec(PoolPart, (env, gym, size, image_size, reward, prompts), {}, reading) for size in sizes]


class PoolGroup(AsyncPool):
    """The environments of all workers as one pool."""

    def __init__(
        self, workers: Sequence[Worker], num_slots: Sequence[int], lockstep: bool, reading: Reading | None = None
    ) -> None:
        """`num_slots` of each worker; in lock-step `receive` waits for all. `reading` is that of the workers."""
        self.workers = list(workers)
        self.num_envs = sum(num_slots)
        self.lockstep = lockstep
        self.reading = reading
        self.row_bytes = RowBytes(0, 0)  # the largest so far
        self.spec: SuiteSpec = workers[0].get(workers[0].call("spec"))
        self._owner = [index for index, count in enumerate(num_slots) for _ in range(count)]
        self._first = np.cumsum([0, *num_slots[:-1]]).tolist()
        self._pending: dict[int, list[tuple[Request, list[int]]]] = {index: [] for index in range(len(workers))}
        self._last_seen: dict[int, Observation] = {}
        self._lost: dict[int, str] = {}  # slots whose episode was lost with their worker, and why
        self._received: list[tuple[int, ChunkOutcome]] = []  # to return: of such slots, and while others are awaited
        self._replacing: dict[int, Future[None]] = {}  # workers that are being replaced
        self._held: dict[int, list[tuple[Any, ...]]] = {}  # calls that wait for them

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: Record = NOTHING) -> None:
        """Start each task in its slot; `record.frames` are the slots whose first frame is returned, too."""
        for index, own in self._by_worker(slots):
            chosen = [tasks[i] for i in own]
            for i in own:
                self._lost.pop(slots[i], None)
            self._call(index, "reset", [slots[i] for i in own], chosen, record)

    def send_chunk(self, slots: Sequence[int], actions: Actions, record: Record = NOTHING) -> None:
        """Run one chunk [len(slots), K, D] in each slot, up to the slot's first end; return what `record` says."""
        self._received += [(slot, self._failed(slot, self._lost[slot])) for slot in slots if slot in self._lost]
        kept = [i for i, slot in enumerate(slots) if slot not in self._lost]
        slots, actions = [slots[i] for i in kept], [actions[i] for i in kept]
        for index, own in self._by_worker(slots):
            self._call(index, "step", [slots[i] for i in own], _together([actions[i] for i in own]), record)

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        """Outcomes of all workers that have finished their calls: one at least, all of them in lock-step.

        None after a while in which all calls waited for workers that are being replaced: the caller may want to stop.
        """
        outcomes, self._received = self._received, []
        if not outcomes and not self._is_waiting():
            raise RuntimeError("nothing was sent that could be received")
        while self._is_waiting() and (self.lockstep or not outcomes):
            ready = self._ready()
            if not ready:
                self._received = outcomes  # until they can be returned together
                return []
            for index in ready:
                outcomes += self._outcomes(index)
        return sorted(outcomes, key=lambda outcome: outcome[0])

    def frame(self, slot: int) -> UInt8Array:
        """A large image [H, W, 3] of a slot as it is now, for videos."""
        if self._owner[slot] in self._replacing:
            wait([self._replacing[self._owner[slot]]])
            self._send_held()
        worker = self.workers[self._owner[slot]]
        frame: UInt8Array = worker.get(worker.call("frame", slot - self._first[self._owner[slot]]))
        return frame

    def close(self) -> None:
        """Nothing to do: the cluster ends the workers."""

    def _by_worker(self, slots: Sequence[int]) -> list[tuple[int, list[int]]]:
        """For each worker that has some of the slots, their indices in the list."""
        indices: dict[int, list[int]] = {}
        for i, slot in enumerate(slots):
            indices.setdefault(self._owner[slot], []).append(i)
        return sorted(indices.items())

    def _call(self, index: int, method: str, slots: list[int], content: Any, record: Record) -> None:
        if index in self._replacing:
            self._held.setdefault(index, []).append((method, slots, content, record))
            return
        worker, first = self.workers[index], self._first[index]
        own = [slot - first for slot in slots]
        recorded = record.of(dict(zip(slots, own, strict=True)))
        queued = len(self._pending[index])  # it runs one call at a time
        limit = worker.timeout_s * (1 + queued)
        if self.reading is not None:
            pieces = min(len(own), 1 + len(own) * self.row_bytes.inputs // PIECE_BYTES)
            stored = pieces + self.reading.keeps_images + len(recorded.steps)
            request = worker.call_and_store(stored, method, own, content, recorded, pieces, timeout_s=limit)
        else:
            request = worker.call(method, own, content, recorded, timeout_s=limit)
        self._pending[index].append((request, slots))

    def _is_waiting(self) -> bool:
        """Whether there are calls whose outcomes have not been received."""
        return any(self._pending.values()) or bool(self._held)

    def _ready(self) -> list[int]:
        """Wait until a worker has finished all its calls, or missed its deadline; the indices of all such workers.

        None after a while in which all calls waited for workers that are being replaced.
        """
        while True:
            self._send_held()
            last = {requests[-1][0].reference: index for index, requests in self._pending.items() if requests}
            if not last:
                held = [self._replacing[index] for index in self._held]
                if not wait(held, timeout=POLL_S, return_when=FIRST_COMPLETED).done:
                    return []
                continue
            left = min(requests[-1][0].deadline for requests in self._pending.values() if requests) - time.monotonic()
            limit = min(left, POLL_S) if self._held else left
            done, _ = ray.wait(list(last), num_returns=1, timeout=max(limit, 0.0))
            if done:  # and those that have finished in the meantime
                done, _ = ray.wait(list(last), num_returns=len(last), timeout=0)
            now = time.monotonic()
            ready = [i for ref, i in last.items() if ref in done or self._pending[i][-1][0].deadline <= now]
            if ready:
                return ready

    def _send_held(self) -> None:
        """Make the calls that have waited for workers which are ready now; the error of one that can't start ends the
        run."""
        for index in [index for index, replaced in self._replacing.items() if replaced.done()]:
            self._replacing.pop(index).result()
            for call in self._held.pop(index, []):
                self._call(index, *call)

    def _outcomes(self, index: int) -> list[tuple[int, ChunkOutcome]]:
        """What a worker returned; one that is lost is replaced, and all its slots get the error."""
        requests, self._pending[index] = self._pending[index], []
        worker = self.workers[index]
        outcomes: list[tuple[int, ChunkOutcome]] = []
        try:
            for request, slots in requests:
                returned: Seen | list[ChunkOutcome] = worker.get(request)
                outcomes += zip(slots, self._named(returned, request), strict=True)
        except WorkerLostError as error:
            self._replacing[index] = replace_later(worker)
            outcomes = [(slot, self._failed(slot, str(error))) for _, slots in requests for slot in slots]
            self._lost |= {slot: str(error) for slot, owner in enumerate(self._owner) if owner == index}
        self._last_seen |= {slot: outcome.observation for slot, outcome in outcomes}
        return outcomes

    def _named(self, returned: Seen | list[ChunkOutcome], request: Request) -> list[ChunkOutcome]:
        """The outcomes with the names of what is stored."""
        if not isinstance(returned, Seen):
            return returned
        inputs, images = self.row_bytes.inputs, self.row_bytes.images
        self.row_bytes = RowBytes(max(inputs, returned.each.inputs), max(images, returned.each.images))
        return returned.named(request.stored)

    def machines(self) -> list[Machine]:
        """The machines that hold what the workers read."""
        slots: Counter[str] = Counter()
        disks: dict[str, int] = {}
        for index, worker in enumerate(self.workers):
            node, disks[node] = worker.get(worker.call("machine"))
            slots[node] += self._owner.count(index)
        return machines_of(slots, disks)

    def _failed(self, slot: int, reason: str) -> ChunkOutcome:
        blank = Observation(np.zeros((1, 1, 1, 3), np.uint8), np.zeros(self.spec.proprio_dim, np.float32), "")
        return started(replace(self._last_seen.get(slot, blank), inputs=None), error=reason)

    def receive_all(self, slots: Sequence[int]) -> list[ChunkOutcome]:
        """The outcomes of these slots, in their order."""
        outcomes, self._received = dict(self._received), []
        while any(slot not in outcomes for slot in slots):
            for index in self._ready():
                outcomes |= dict(self._outcomes(index))
        return [outcomes[slot] for slot in slots]


def _together(actions: list[Action]) -> Actions:
    """Chunks as one array, which is sent faster than many; texts as they are."""
    chunks = [action for action in actions if not isinstance(action, str)]
    return np.stack(chunks) if len(chunks) == len(actions) else actions
