"""A model of the loop on many processes: how long an iteration takes, how busy each role is, and which is busiest.

    python benchmarks/scaling_model.py --env-workers 64 --slots 1 --engines 8 --ranks 8 --decisions 33000 …  [--json]
    python benchmarks/scaling_model.py --tables      # the table of docs/scaling.md (scaling_7b.py)
    python benchmarks/scaling_model.py --measure FOLDER    # short real runs (scaling_measure.py), which are kept there

    driver:        receive ─► process ─► (engines) ─► send ─► receive …        one at a time, as the collector does
    env workers:   step all slots of a call, then return them together
    engines:       the rows of a decision, split evenly; never during a sync
    learners:      update: the microbatches of a minibatch in turn, then the ring; then the sync to the engines

Episodes differ in length. A batch is complete as soon as enough episodes have ended, and episodes are begun for 1 +
max_staleness batches: in an asynchronous run slots go on while the policy is trained.

It is a discrete-event simulation with measured times as inputs. All work on CPUs shares `cores`: with more work than
cores, all of it slows down equally, and by `crowding` when all of them are busy, since they share caches and memory.
Roles with their own devices (GPUs) are not affected.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from typing import Any

import numpy as np

Process = Generator[Any, None, None]


@dataclass(frozen=True)
class Loop:
    """The inputs of the model: sizes, and measured seconds and bytes."""

    # sizes
    env_workers: int = 1
    slots: int = 32  # of each environment worker
    engines: int = 1
    ranks: int = 1
    cores: float = 1e6  # shared by all work on CPUs; without what other processes take of them
    crowding: float = 1.0  # how much longer work takes while all cores are busy than alone
    decisions: int = 2000  # of a rollout
    episode: int = 10  # decisions of an episode, in the mean
    episode_std: float = 0.0  # std of the length of episodes over its mean
    episodes: int = 0  # of a rollout; 0: as many as make up the decisions
    lengths: tuple[int, ...] = ()  # decisions of each episode, one rollout after the other; empty: as above
    # environments
    env_fixed_s: float = 0.0  # a call of a worker
    env_chunk_s: float = 0.01  # and for every slot that steps
    env_std: float = 0.0  # std of a call's time over its mean
    reset_s: float = 0.0  # a slot's reset
    lockstep: bool = False
    # decisions
    engine_fixed_s: float = 0.01  # a call of an engine
    engine_row_s: float = 0.001  # and for every row
    driver_call_s: float = 0.0  # work of the driver for one round of decisions, of one worker and one engine
    driver_more_s: float = 0.0  # and for every further worker and engine of the round
    driver_row_s: float = 0.0  # and for every row: process, pickling, decoding
    # learning
    update_s: float = 0.01  # a decision, forward and backward, all epochs, on one rank
    batch_s: float = 0.0  # a decision: advantages and batch, on the driver
    minibatches: int = 1  # of a batch: one after the other
    microbatch: int = 32  # rows of one pass: a minibatch in pieces of so many, which the ranks take in turn
    step_s: float = 0.0  # an optimizer step, whatever its rows
    shard_bytes: float = 0.0  # weights that are gathered twice and reduced once for each microbatch; 0: not sharded
    shard_ranks: int = 0  # that share one copy of the weights; 0: all
    gradient_bytes: float = 0.0  # reduced once for each optimizer step
    steps: int = 4  # optimizer steps
    ring_bytes_per_s: float = 1e9
    # weights to the engines
    sync_bytes: float = 0.0
    sync_copies: int = 1  # that leave rank 0, one after the other
    sync_bytes_per_s: float = 1e9
    sync_fixed_s: float = 0.0
    staged: bool = False  # engines decide while the weights are on their way, as in asynchronous runs
    commit_s: float = 0.0  # then they switch to them, and only meanwhile do they not decide
    # roles that run on the shared cores
    engines_on_cores: bool = False
    learners_on_cores: bool = False
    # overlap
    max_staleness: int = 0  # batches that are begun before the update of the one before; 0: in turn
    iterations: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Forecast:
    """The model's prediction for one iteration."""

    iteration_s: float
    rollout_s: float
    batch_s: float  # advantages and batch, on the driver
    update_s: float
    sync_s: float
    busy: dict[str, float]  # fraction of the time that members of a role work, by role
    rows_per_call: float  # of one engine
    busiest: str  # the role that works for the largest fraction of the iteration
    busiest_share: float  # and that fraction: 1 is always busy


class Signal:
    """An event that processes wait for; it happens once."""

    def __init__(self) -> None:
        self.happened = False
        self.waiting: list[Process] = []


@dataclass(frozen=True)
class Work:
    """Seconds of work by a member of a role."""

    role: str
    seconds: float
    on_cores: bool = False


class Simulation:
    """Runs processes (generators that yield Work to be done or a Signal to wait for) in simulated time."""

    def __init__(self, cores: float, crowding: float = 1.0) -> None:
        self.now = 0.0
        self.busy: dict[str, float] = {}
        self._cores, self._crowding = cores, crowding
        self._virtual = 0.0  # work done on each task on the cores since the start
        self._shared: list[tuple[float, int, Process, Work, float]] = []  # by their end in virtual time
        self._own: list[tuple[float, int, Process, Work, float]] = []  # by their end
        self._order = count()

    def start(self, process: Process) -> Signal:
        """Run a process concurrently with the others; the signal is its end."""
        ended = Signal()

        def whole() -> Process:
            yield from process
            self.signal(ended)

        self._advance(whole())
        return ended

    def signal(self, signal: Signal) -> None:
        """Resume all processes that wait for it."""
        signal.happened = True
        waiting, signal.waiting = signal.waiting, []
        for process in waiting:
            self._advance(process)

    def run(self) -> None:
        """Run until nothing is left to do."""
        while self._shared or self._own:
            rate = self._rate(len(self._shared))
            shared_end = self.now + (self._shared[0][0] - self._virtual) / rate if self._shared else math.inf
            own_end = self._own[0][0] if self._own else math.inf
            end = max(min(shared_end, own_end), self.now)
            if self._shared:
                self._virtual += (end - self.now) * rate
            self.now = end
            _, _, process, work, began = heapq.heappop(self._shared if shared_end <= own_end else self._own)
            self.busy[work.role] = self.busy.get(work.role, 0.0) + self.now - began
            self._advance(process)

    def _rate(self, num_tasks: int) -> float:
        """How fast each of so many tasks on the cores advances: 1 is alone, on a core of its own."""
        if num_tasks == 0:
            return 1.0
        others = 1.0 if self._cores <= 1 else min((num_tasks - 1) / (self._cores - 1), 1.0)  # fraction that is busy
        return min(1.0, self._cores / num_tasks) / (1 + (self._crowding - 1) * others)

    def _advance(self, process: Process) -> None:
        for wanted in process:
            if isinstance(wanted, Signal):
                if not wanted.happened:
                    wanted.waiting.append(process)
                    return
            else:
                queue, start = (self._shared, self._virtual) if wanted.on_cores else (self._own, self.now)
                heapq.heappush(queue, (start + wanted.seconds, next(self._order), process, wanted, self.now))
                return


class Lock:
    """One holder at a time, in the order of requests."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._held = False
        self._queue: list[Signal] = []

    def take(self) -> Process:
        """Wait for it."""
        if self._held:
            mine = Signal()
            self._queue.append(mine)
            yield mine
        self._held = True

    def leave(self) -> None:
        """Release it to the next in the queue."""
        self._held = bool(self._queue)
        if self._queue:
            self._simulation.signal(self._queue.pop(0))


def ring_seconds(num_bytes: float, ranks: int, bytes_per_s: float) -> float:
    """One all-gather or reduce-scatter of `num_bytes` in total: each rank sends all but its own part."""
    return num_bytes * (ranks - 1) / ranks / bytes_per_s


def episode_lengths(loop: Loop, count: int, random: np.random.Generator) -> tuple[int, ...]:
    """Decisions of each of so many episodes, which add up to those of a rollout."""
    shape = loop.episode_std**-2 if loop.episode_std else math.inf
    sampled = random.gamma(shape, size=count) if loop.episode_std else np.ones(count)
    ends = np.round(np.cumsum(sampled) / sampled.sum() * loop.decisions).astype(int)
    return tuple(max(length, 1) for length in np.diff(ends, prepend=0).tolist())


class Iterations:
    """The simulated iterations of a run."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.sim = Simulation(loop.cores, loop.crowding)
        self.random = np.random.default_rng(loop.seed)
        self.driver, self.engine = Lock(self.sim), Lock(self.sim)
        self.calls = 0
        self.episodes = loop.episodes or len(loop.lengths) or max(round(loop.decisions / loop.episode), 1)
        self.lengths = loop.lengths or episode_lengths(loop, self.episodes, self.random)
        self._num_updated = 0
        self._num_pending = 0  # environment workers with pending calls
        self._done: list[_Worker] = []  # those that have finished all of their calls
        self._listening: Signal | None = None
        self.spans: dict[str, list[float]] = {"rollout": [], "batch": [], "update": [], "sync": []}
        self.ends: list[float] = []

    def decisions(self, iteration: int) -> int:
        """Of the episodes of an iteration."""
        first = iteration * self.episodes
        return sum(self.lengths[index % len(self.lengths)] for index in range(first, first + self.episodes))

    def forecast(self) -> Forecast:
        """Run them; the first one is excluded, since it has nothing to overlap with."""
        loop = self.loop
        collected = [Signal() for _ in range(loop.iterations)]
        updated = [Signal() for _ in range(loop.iterations)]
        self.sim.start(self._collecting(collected, updated))
        self.sim.start(self._learning(collected, updated))
        self.sim.run()
        seconds = (self.ends[-1] - self.ends[0]) / (loop.iterations - 1)
        whole = self.ends[-1]
        members = {"environments": loop.env_workers, "engines": loop.engines, "learners": loop.ranks, "driver": 1}
        busy = {role: self.sim.busy.get(role, 0.0) / whole / size for role, size in members.items()}
        mean = {name: float(np.mean(values[1:])) for name, values in self.spans.items()}
        rows = sum(map(self.decisions, range(loop.iterations))) / max(self.calls, 1)
        fractions = {role: busy[role] for role in ("environments", "engines", "driver")}
        fractions |= {"learners": mean["update"] / seconds, "sync": mean["sync"] / seconds}
        busiest = max(fractions, key=lambda name: fractions[name])
        means = (mean[name] for name in ("rollout", "batch", "update", "sync"))
        return Forecast(seconds, *means, busy, rows, busiest, fractions[busiest])

    def _learning(self, collected: list[Signal], updated: list[Signal]) -> Process:
        for iteration, (ready, done) in enumerate(zip(collected, updated, strict=True)):
            yield ready
            began = self.sim.now
            yield from self._on_driver(self.loop.batch_s * self.decisions(iteration))
            self.spans["batch"].append(self.sim.now - began)
            began = self.sim.now
            yield from self._update(self.decisions(iteration))
            self.spans["update"].append(self.sim.now - began)
            began = self.sim.now
            yield from self._sync()
            self.spans["sync"].append(self.sim.now - began)
            self.ends.append(self.sim.now)
            self._num_updated += 1
            self.sim.signal(done)

    def _update(self, decisions: int) -> Process:
        """The ranks take the microbatches of each minibatch in turn, and wait for each other at its end."""
        loop = self.loop
        steps_each = loop.steps / loop.minibatches  # epochs are part of `update_s`
        for index in range(loop.minibatches):
            rows = decisions // loop.minibatches + (index < decisions % loop.minibatches)
            pieces = [min(loop.microbatch, rows - first) for first in range(0, rows, loop.microbatch)]
            own = [sum(pieces[rank :: loop.ranks]) for rank in range(loop.ranks)]
            on_cores, step_s = loop.learners_on_cores, loop.step_s * steps_each
            works = [Work("learners", each * loop.update_s + step_s, on_cores) for each in own]
            yield from self._together([_only(work) for work in works])
            rounds = math.ceil(len(pieces) / loop.ranks)
            ring = 3 * rounds * ring_seconds(loop.shard_bytes, loop.shard_ranks or loop.ranks, loop.ring_bytes_per_s)
            ring += steps_each * 2 * ring_seconds(loop.gradient_bytes, loop.ranks, loop.ring_bytes_per_s)
            yield Work("ring", ring)

    def _sync(self) -> Process:
        loop = self.loop
        sending = Work(
            "sync",
            loop.sync_fixed_s + loop.sync_copies * loop.sync_bytes / loop.sync_bytes_per_s,
            loop.learners_on_cores,
        )
        if loop.staged:
            yield sending
        yield from self.engine.take()
        yield Work("sync", loop.commit_s, loop.learners_on_cores) if loop.staged else sending
        self.engine.leave()

    def _on_driver(self, seconds: float) -> Process:
        if seconds:
            yield from self.driver.take()
            yield Work("driver", seconds, on_cores=True)
            self.driver.leave()

    def _together(self, processes: list[Process]) -> Process:
        yield from [self.sim.start(process) for process in processes]

    def _collecting(self, collected: list[Signal], updated: list[Signal]) -> Process:
        """The collector's loop (rollout/collector.py, distributed/environments.py), for all iterations."""
        loop, size = self.loop, self.episodes
        idle = [_Worker(loop.slots) for _ in range(loop.env_workers)]  # those with free slots
        ready: list[_Worker] = []
        began: list[float] = []
        started = ended = num_collected = 0
        while num_collected < loop.iterations:
            allowed = size * min(self._num_updated + 1 + loop.max_staleness, loop.iterations)
            for worker in idle:
                chosen = range(started, min(started + worker.free, allowed))
                began += [self.sim.now for index in chosen if index % size == 0]
                started, worker.free = started + len(chosen), worker.free - len(chosen)
                self._start_call(worker, [self.lengths[index % len(self.lengths)] for index in chosen], loop.reset_s)
            idle = [worker for worker in idle if worker.free]
            if not self._num_pending:
                yield updated[self._num_updated]
                continue
            for worker in (yield from self._receive()):
                running = [decisions for decisions in worker.returned if decisions > 0]
                ended += len(worker.returned) - len(running)
                idle += [worker] if len(running) < len(worker.returned) and not worker.free else []
                worker.free += len(worker.returned) - len(running)
                worker.returned = []
                worker.ready += running
                ready += [worker] if running else []
            while ended >= size * (num_collected + 1):
                self.spans["rollout"].append(self.sim.now - began[num_collected])
                self.sim.signal(collected[num_collected])
                num_collected += 1
            if ready and not (loop.lockstep and idle and started < allowed):
                yield from self._decide(sum(len(worker.ready) for worker in ready), len(ready))
                for worker in ready:
                    stepped, worker.ready = [decisions - 1 for decisions in worker.ready], []
                    self._start_call(worker, stepped, loop.env_chunk_s)
                ready = []

    def _decide(self, rows: int, num_workers: int) -> Process:
        loop = self.loop
        num_more = num_workers - 1 + min(rows, loop.engines) - 1
        yield from self._on_driver(loop.driver_call_s + loop.driver_more_s * num_more + loop.driver_row_s * rows)
        yield from self.engine.take()
        sizes = [rows // loop.engines + (index < rows % loop.engines) for index in range(min(rows, loop.engines))]
        self.calls += len(sizes)
        works = [Work("engines", loop.engine_fixed_s + loop.engine_row_s * n, loop.engines_on_cores) for n in sizes]
        yield from self._together([_only(work) for work in works])
        self.engine.leave()

    def _start_call(self, worker: _Worker, slots: list[int], each_s: float) -> None:
        """Call a worker, which runs its calls one by one; `slots` are the decisions that remain in each slot."""
        if not slots:
            return
        seconds = self.loop.env_fixed_s + each_s * len(slots)
        if self.loop.env_std:
            shape = self.loop.env_std**-2
            seconds *= self.random.gamma(shape, 1 / shape)
        self._num_pending += not worker.calls
        worker.calls += 1
        previous, worker.last = worker.last, Signal()
        self.sim.start(self._call(worker, slots, previous, worker.last, seconds))

    def _call(
        self, worker: _Worker, slots: list[int], previous: Signal | None, last: Signal, seconds: float
    ) -> Process:
        if previous is not None:
            yield previous
        yield Work("environments", seconds, on_cores=True)
        worker.returned += slots
        worker.calls -= 1
        self.sim.signal(last)
        if not worker.calls:
            worker.last = None
            self._done.append(worker)
            listening, self._listening = self._listening, None
            if listening is not None:
                self.sim.signal(listening)

    def _receive(self) -> Generator[Any, None, list[_Worker]]:
        """Wait for one worker to finish all of its calls, in lock-step for all; returns all such workers."""
        while len(self._done) < (self._num_pending if self.loop.lockstep else 1):
            self._listening = Signal()
            yield self._listening
        done, self._done = self._done, []
        self._num_pending -= len(done)
        return done


@dataclass
class _Worker:
    """An environment worker."""

    free: int  # slots without an episode
    calls: int = 0  # pending
    last: Signal | None = None  # the end of the last of them
    returned: list[int] = field(default_factory=list)  # decisions left in each slot that it returned
    ready: list[int] = field(default_factory=list)  # the same for slots that the engine decides for


def _only(work: Work) -> Process:
    yield work


def forecast(loop: Loop) -> Forecast:
    """The model's prediction."""
    return Iterations(loop).forecast()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tables", action="store_true", help="the tables of docs/scaling.md")
    parser.add_argument(
        "--measure",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="predict short real runs, and compare; they are kept in the folder, and read if they are there already",
    )
    for option in fields(Loop):
        kind = type(option.default)
        if kind is tuple:
            continue
        if kind is bool:
            parser.add_argument(f"--{option.name.replace('_', '-')}", action="store_true")
        else:
            parser.add_argument(f"--{option.name.replace('_', '-')}", type=kind, default=option.default)
    arguments = vars(parser.parse_args())
    as_json, tables, measured = (arguments.pop(name) for name in ("json", "tables", "measure"))
    if tables:
        from scaling_7b import scaling_tables

        for line in scaling_tables():
            print(line, flush=True)
    elif measured is not None:
        from scaling_measure import measure

        print(measure(measured))
    else:
        result = forecast(Loop(**arguments))
        print(json.dumps(asdict(result), indent=2) if as_json else describe(result))


def describe(result: Forecast) -> str:
    """The forecast in lines."""
    busy = ", ".join(f"{role} {fraction:.0%}" for role, fraction in result.busy.items())
    return (
        f"iteration {result.iteration_s:.2f} s: rollout {result.rollout_s:.2f}, batch {result.batch_s:.2f}, "
        f"update {result.update_s:.2f}, "
        f"sync {result.sync_s:.2f}\nbusy: {busy}; {result.rows_per_call:.1f} rows a call of an engine\n"
        f"busiest: {result.busiest}, {result.busiest_share:.0%} of the time"
    )


if __name__ == "__main__":
    main()
