"""A model of the loop on many processes: how long an iteration takes, how busy each role is, and which is busiest.

    python benchmarks/scaling_model.py --env-workers 64 --slots 1 --engines 8 --ranks 8 --decisions 33000 …  [--json]
    python benchmarks/scaling_model.py --tables      # the table of docs/scaling.md (scaling_7b.py)
    python benchmarks/scaling_model.py --measure     # short real runs (scaling_measure.py): one gives the parameters

    driver:        receive ─► process ─► (engines) ─► send ─► receive …        one at a time, as the collector does
    env workers:   step all slots they were asked for, then answer together
    engines:       the rows of a decision, split evenly; never during a sync
    learners:      update: forward and backward of their share, then the ring; then the sync to the engines

It is a simulation of events, with measured times as inputs. Whatever runs on CPUs shares `cores`: with more work than
cores, all of it goes slower alike. Roles with devices of their own (GPUs) don't take part in that.
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
    """What is modelled: sizes, and measured seconds and bytes."""

    # sizes
    env_workers: int = 1
    slots: int = 32  # of each environment worker
    engines: int = 1
    ranks: int = 1
    cores: int = 10**6  # shared by all work on CPUs
    decisions: int = 2000  # of a rollout
    episode: int = 10  # decisions of an episode
    # environments
    env_fixed_s: float = 0.0  # a call of a worker
    env_chunk_s: float = 0.01  # and for every slot that steps
    env_spread: float = 0.0  # standard deviation of a call's time over its mean
    reset_s: float = 0.0  # a slot's reset
    lockstep: bool = False
    # decisions
    engine_fixed_s: float = 0.01  # a call of an engine
    engine_row_s: float = 0.001  # and for every row
    driver_call_s: float = 0.0  # what the driver does for one round of decisions
    driver_row_s: float = 0.0  # and for every row: process, pickling, decoding
    # learning
    update_s: float = 0.01  # a decision, forward and backward, all epochs, on one rank
    batch_s: float = 0.0  # a decision: advantages and batch, on the driver
    microbatch: int = 32  # rows of a rank between two rounds of the ring
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
    # who runs on the shared cores
    engines_on_cores: bool = False
    learners_on_cores: bool = False
    # overlap
    max_staleness: int = 0  # 0: in turn
    iterations: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Forecast:
    """What the model says of one iteration."""

    iteration_s: float
    rollout_s: float
    batch_s: float  # advantages and batch, on the driver
    update_s: float
    sync_s: float
    busy: dict[str, float]  # share of the time that members of a role work, by role
    rows_per_call: float  # of one engine
    busiest: str  # what works for the largest share of the iteration
    busiest_share: float  # and that share: 1 is full


class Signal:
    """Something that processes wait for; it happens once."""

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

    def __init__(self, cores: int) -> None:
        self.now = 0.0
        self.busy: dict[str, float] = {}
        self._cores = cores
        self._virtual = 0.0  # work that each task on the cores has had since the beginning
        self._shared: list[tuple[float, int, Process, Work, float]] = []  # by their end in virtual time
        self._own: list[tuple[float, int, Process, Work, float]] = []  # by their end
        self._order = count()

    def start(self, process: Process) -> Signal:
        """Run a process beside the others; the signal is its end."""
        ended = Signal()

        def whole() -> Process:
            yield from process
            self.signal(ended)

        self._advance(whole())
        return ended

    def signal(self, signal: Signal) -> None:
        """Let everybody go on who waits for it."""
        signal.happened = True
        waiting, signal.waiting = signal.waiting, []
        for process in waiting:
            self._advance(process)

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._shared or self._own:
            rate = min(1.0, self._cores / len(self._shared)) if self._shared else 1.0
            shared_end = self.now + (self._shared[0][0] - self._virtual) / rate if self._shared else math.inf
            own_end = self._own[0][0] if self._own else math.inf
            end = max(min(shared_end, own_end), self.now)
            if self._shared:
                self._virtual += (end - self.now) * rate
            self.now = end
            _, _, process, work, began = heapq.heappop(self._shared if shared_end <= own_end else self._own)
            self.busy[work.role] = self.busy.get(work.role, 0.0) + self.now - began
            self._advance(process)

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
    """One holder at a time, in the order of asking."""

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
        """The next one has it."""
        self._held = bool(self._queue)
        if self._queue:
            self._simulation.signal(self._queue.pop(0))


def ring_seconds(num_bytes: float, ranks: int, bytes_per_s: float) -> float:
    """One all-gather or reduce-scatter of so many bytes in all: each rank passes on all but its own share."""
    return num_bytes * (ranks - 1) / ranks / bytes_per_s


class Iterations:
    """The iterations of a run, simulated."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.sim = Simulation(loop.cores)
        self.random = np.random.default_rng(loop.seed)
        self.driver, self.engine = Lock(self.sim), Lock(self.sim)
        self.calls = 0
        self._asked = 0  # environment workers that have calls to answer
        self._done: list[_Worker] = []  # those that have answered all of them
        self._listening: Signal | None = None
        self.spans: dict[str, list[float]] = {"rollout": [], "batch": [], "update": [], "sync": []}
        self.ends: list[float] = []

    def forecast(self) -> Forecast:
        """Run them; the first one is left out, as nothing is there yet to overlap with."""
        loop = self.loop
        collected = [Signal() for _ in range(loop.iterations)]
        learnt = [Signal() for _ in range(loop.iterations)]
        self.sim.start(self._collecting(collected, learnt))
        self.sim.start(self._learning(collected, learnt))
        self.sim.run()
        seconds = (self.ends[-1] - self.ends[0]) / (loop.iterations - 1)
        whole = self.ends[-1]
        members = {"environments": loop.env_workers, "engines": loop.engines, "learners": loop.ranks, "driver": 1}
        busy = {role: self.sim.busy.get(role, 0.0) / whole / number for role, number in members.items()}
        mean = {name: float(np.mean(values[1:])) for name, values in self.spans.items()}
        rows = loop.decisions * loop.iterations / max(self.calls, 1)
        shares = {role: busy[role] for role in ("environments", "engines", "driver")}
        shares |= {"learners": mean["update"] / seconds, "sync": mean["sync"] / seconds}
        busiest = max(shares, key=lambda name: shares[name])
        means = (mean[name] for name in ("rollout", "batch", "update", "sync"))
        return Forecast(seconds, *means, busy, rows, busiest, shares[busiest])

    def _collecting(self, collected: list[Signal], learnt: list[Signal]) -> Process:
        for index, ready in enumerate(collected):
            behind = index - 1 - self.loop.max_staleness
            if behind >= 0:
                yield learnt[behind]
            began = self.sim.now
            yield from self._rollout()
            self.spans["rollout"].append(self.sim.now - began)
            self.sim.signal(ready)

    def _learning(self, collected: list[Signal], learnt: list[Signal]) -> Process:
        for ready, done in zip(collected, learnt, strict=True):
            yield ready
            began = self.sim.now
            yield from self._on_driver(self.loop.batch_s * self.loop.decisions)
            self.spans["batch"].append(self.sim.now - began)
            began = self.sim.now
            yield from self._update()
            self.spans["update"].append(self.sim.now - began)
            began = self.sim.now
            yield from self.engine.take()
            yield from self._sync()
            self.engine.leave()
            self.spans["sync"].append(self.sim.now - began)
            self.ends.append(self.sim.now)
            self.sim.signal(done)

    def _update(self) -> Process:
        loop = self.loop
        share = loop.decisions / loop.ranks
        rounds = math.ceil(share / loop.microbatch) if loop.shard_bytes else 0
        ring = rounds * 3 * ring_seconds(loop.shard_bytes, loop.shard_ranks or loop.ranks, loop.ring_bytes_per_s)
        ring += loop.steps * 2 * ring_seconds(loop.gradient_bytes, loop.ranks, loop.ring_bytes_per_s)
        work = Work("learners", share * loop.update_s, loop.learners_on_cores)
        yield from self._together([_only(work) for _ in range(loop.ranks)])
        yield Work("ring", ring)

    def _sync(self) -> Process:
        loop = self.loop
        seconds = loop.sync_fixed_s + loop.sync_copies * loop.sync_bytes / loop.sync_bytes_per_s
        yield Work("sync", seconds, loop.learners_on_cores)

    def _on_driver(self, seconds: float) -> Process:
        if seconds:
            yield from self.driver.take()
            yield Work("driver", seconds, on_cores=True)
            self.driver.leave()

    def _together(self, processes: list[Process]) -> Process:
        yield from [self.sim.start(process) for process in processes]

    def _rollout(self) -> Process:
        """The collector's loop (rollout/collector.py, distributed/environments.py)."""
        loop = self.loop
        waiting = math.ceil(loop.decisions / loop.episode)
        idle = [_Worker(loop.slots) for _ in range(loop.env_workers)]  # those with slots that are free
        ready: list[_Worker] = []
        while waiting or self._asked:
            for worker in idle:
                started = min(worker.free, waiting)
                waiting, worker.free = waiting - started, worker.free - started
                self._ask(worker, [loop.episode] * started, loop.reset_s)
            idle = []
            for worker in (yield from self._receive()):
                going_on = [decisions for decisions in worker.answered if decisions > 0]
                worker.free += len(worker.answered) - len(going_on)
                worker.answered = []
                worker.ready += going_on
                ready += [worker] if going_on else []
                idle += [worker] if worker.free else []
            if ready and not (loop.lockstep and waiting and idle):
                yield from self._decide(sum(len(worker.ready) for worker in ready))
                for worker in ready:
                    stepped, worker.ready = [decisions - 1 for decisions in worker.ready], []
                    self._ask(worker, stepped, loop.env_chunk_s)
                ready = []

    def _decide(self, rows: int) -> Process:
        loop = self.loop
        yield from self._on_driver(loop.driver_call_s + loop.driver_row_s * rows)
        yield from self.engine.take()
        shares = [rows // loop.engines + (index < rows % loop.engines) for index in range(min(rows, loop.engines))]
        self.calls += len(shares)
        works = [Work("engines", loop.engine_fixed_s + loop.engine_row_s * s, loop.engines_on_cores) for s in shares]
        yield from self._together([_only(work) for work in works])
        self.engine.leave()

    def _ask(self, worker: _Worker, slots: list[int], each_s: float) -> None:
        """A call of a worker, which works on one after the other; `slots` are the decisions that will be left."""
        if not slots:
            return
        seconds = self.loop.env_fixed_s + each_s * len(slots)
        if self.loop.env_spread:
            shape = self.loop.env_spread**-2
            seconds *= self.random.gamma(shape, 1 / shape)
        self._asked += not worker.calls
        worker.calls += 1
        previous, worker.last = worker.last, Signal()
        self.sim.start(self._call(worker, slots, previous, worker.last, seconds))

    def _call(
        self, worker: _Worker, slots: list[int], previous: Signal | None, last: Signal, seconds: float
    ) -> Process:
        if previous is not None:
            yield previous
        yield Work("environments", seconds, on_cores=True)
        worker.answered += slots
        worker.calls -= 1
        self.sim.signal(last)
        if not worker.calls:
            worker.last = None
            self._done.append(worker)
            listening, self._listening = self._listening, None
            if listening is not None:
                self.sim.signal(listening)

    def _receive(self) -> Generator[Any, None, list[_Worker]]:
        """Wait for one worker that has answered everything, in lock-step for all; all such workers."""
        while len(self._done) < (self._asked if self.loop.lockstep else 1):
            self._listening = Signal()
            yield self._listening
        done, self._done = self._done, []
        self._asked -= len(done)
        return done


@dataclass
class _Worker:
    """An environment worker."""

    free: int  # slots without an episode
    calls: int = 0  # not answered yet
    last: Signal | None = None  # the end of the last of them
    answered: list[int] = field(default_factory=list)  # decisions left in each slot that it answered for
    ready: list[int] = field(default_factory=list)  # the same for slots that the engine decides for


def _only(work: Work) -> Process:
    yield work


def forecast(loop: Loop) -> Forecast:
    """What the model says."""
    return Iterations(loop).forecast()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tables", action="store_true", help="the tables of docs/scaling.md")
    parser.add_argument("--measure", action="store_true", help="predict short real runs, and compare")
    for option in fields(Loop):
        kind = type(option.default)
        if kind is bool:
            parser.add_argument(f"--{option.name.replace('_', '-')}", action="store_true")
        else:
            parser.add_argument(f"--{option.name.replace('_', '-')}", type=kind, default=option.default)
    arguments = vars(parser.parse_args())
    as_json, tables, measured = (arguments.pop(name) for name in ("json", "tables", "measure"))
    if tables:
        from scaling_7b import scaling_tables

        print(scaling_tables())
    elif measured:
        from scaling_measure import compare

        print(compare())
    else:
        result = forecast(Loop(**arguments))
        print(json.dumps(asdict(result), indent=2) if as_json else describe(result))


def describe(result: Forecast) -> str:
    """The forecast in lines."""
    busy = ", ".join(f"{role} {share:.0%}" for role, share in result.busy.items())
    return (
        f"iteration {result.iteration_s:.2f} s: rollout {result.rollout_s:.2f}, batch {result.batch_s:.2f}, "
        f"update {result.update_s:.2f}, "
        f"sync {result.sync_s:.2f}\nbusy: {busy}; {result.rows_per_call:.1f} rows a call of an engine\n"
        f"busiest: {result.busiest}, {result.busiest_share:.0%} of the time"
    )


if __name__ == "__main__":
    main()
