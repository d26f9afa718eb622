"""`vlarl bench iteration`: one iteration of GRPO by the loop's own parts, with an environment that costs nothing.

NoisePool ─► Collector with TorchEngine ─► GRPO's advantages ─► Learner.update ─► weights to the engine
└──────────── rollout ────────────────┘   └──── rest ──────┘   └── update ───┘   └── rest ──────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from vlarl.algorithms import build_algorithm
from vlarl.algorithms.base import Algorithm
from vlarl.bench.busy import kernel_seconds
from vlarl.bench.noise_env import SUITE, NoisePool
from vlarl.bench.request import Bench, BenchRequest
from vlarl.bench.results import Report, Row
from vlarl.bench.timing import Timing, synchronize
from vlarl.decisions import Sampling, TrainBatch
from vlarl.errors import UsageError, VlarlError
from vlarl.observability.clock import Stopwatch
from vlarl.observability.trace import NoTrace
from vlarl.policies.base import Policy
from vlarl.policies.bench_model import BenchModel
from vlarl.rollout.collector import Collector
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.rollout.tasks import derive_seed
from vlarl.training.batch import build_batch, with_estimates
from vlarl.training.learner import Learner
from vlarl.types import Task, Trajectory

GROUP_SIZE = 8
SHORT_DECISIONS = 4  # of each slot, in the iterations that warm up and that are profiled
PARTS = ("rollout", "update", "rest")


@dataclass
class Iterations:
    """The parts of a run, and how many iterations they have had."""

    bench: Bench
    policy: Policy
    engine: TorchEngine
    algorithm: Algorithm
    learner: Learner
    num_envs: int
    done: int = 0

    def run(self, episode_decisions: int) -> dict[str, float]:
        """One iteration, with so many decisions of each slot: seconds of its parts."""
        self.done += 1
        watch = Stopwatch(NoTrace(), "bench")
        with closing(NoisePool(self.policy, self.policy.bench_model(), self.num_envs, episode_decisions)) as pool:
            with watch.timed("rollout"):
                trajectories = self.roll_out(pool)
            with watch.timed("rest"):
                batch = self.batch(trajectories)
            with watch.timed("update"):
                self.update(batch)
            with watch.timed("rest"):
                self.engine.weights_changed(self.learner.version)
                synchronize(self.bench.device)
        return dict(watch.seconds)

    def roll_out(self, pool: NoisePool) -> list[Trajectory]:
        """One episode in each slot, in groups."""
        size = min(GROUP_SIZE, self.num_envs)
        tasks = [
            Task(SUITE, 0, 0, derive_seed(self.done, index), index // size, index % size, size, self.done)
            for index in range(self.num_envs)
        ]
        collector = Collector(pool, self.policy, self.engine)
        ended = dict(collector.episodes(tasks, Sampling(temperature=1.0)))
        synchronize(self.bench.device)
        return [ended[index].trajectory for index in range(len(tasks))]

    def batch(self, trajectories: Sequence[Trajectory]) -> TrainBatch:
        """The decisions with GRPO's advantages."""
        batch = build_batch(trajectories)
        batch = self.learner.annotate(batch, self.done).onto(batch, self.learner.config)
        return with_estimates(batch, trajectories, self.algorithm.estimate(trajectories, None), self.algorithm.level)

    def update(self, batch: TrainBatch) -> None:
        """One optimizer step on all of them."""
        result = self.learner.update(batch, self.done, lambda done, of: None)
        synchronize(self.bench.device)
        if result.num_skipped_steps:
            raise VlarlError("an update was not finite, so its timing means nothing: measure another checkpoint.")

    def busy_seconds(self, episode_decisions: int) -> dict[str, float]:
        """Seconds in which the GPU computes during rollout and update, of an iteration of its own."""
        self.done += 1
        found: dict[str, float] = {}
        trajectories: list[Trajectory] = []
        with closing(NoisePool(self.policy, self.policy.bench_model(), self.num_envs, episode_decisions)) as pool:
            device = self.bench.device
            found["rollout"] = kernel_seconds(lambda: trajectories.extend(self.roll_out(pool)), device)
            batch = self.batch(trajectories)
            found["update"] = kernel_seconds(lambda: self.update(batch), device)
        self.engine.weights_changed(self.learner.version)
        return found


def bench_iteration(request: BenchRequest, decisions: int, num_envs: int, microbatch: int) -> Report:
    """Measure whole iterations of so many decisions, in batches of `num_envs`."""
    size = min(GROUP_SIZE, num_envs)
    if decisions % num_envs or num_envs % size or size < 2:
        raise UsageError(
            f"--decisions {decisions} --rows {num_envs}: the decisions must divide into batches of so many rows, and "
            f"the rows into groups of {size if size > 1 else 2}; take for example 1024 and 32."
        )
    bench = Bench(request)
    policy = bench.adapt(bench.load(), adapters=request.adapters is not False)
    settings = bench.settings(policy, decisions=decisions, rows=num_envs, microbatch=microbatch)
    rows, notes = [], []
    what = f"iteration of {decisions} decisions"

    def measure() -> Row:
        iterations = start(bench, policy, num_envs, microbatch)
        shorts = [iterations.run(SHORT_DECISIONS) for _ in range(2)]  # a shape is recorded in the first
        busy = busy_fractions(iterations, shorts[-1]) if bench.device.type == "cuda" else {}
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
        found = [iterations.run(decisions // num_envs) for _ in range(request.repeats)]
        rows.extend(part_rows(bench, policy, found, decisions, num_envs, microbatch, busy))
        if busy:
            notes.append(_busy_note(busy))
        floors = [row.floor_s for row in rows if row.floor_s is not None]
        peak = torch.cuda.max_memory_allocated(bench.device) if bench.device.type == "cuda" else None
        whole = Timing(tuple(sum(each.values()) for each in found), peak)
        return Row(what, decisions, whole, floor_s=sum(floors), facts={"gpu_busy": busy.get("iteration")})

    rows.insert(0, bench.attempt(what, decisions, measure))
    return Report("iteration", settings, bench.rates, rows, notes)


def start(bench: Bench, policy: Policy, num_envs: int, microbatch: int) -> Iterations:
    """Engine, algorithm and learner on one policy, as in a run in one process."""
    config = bench.learner_config(microbatch)
    own = config.algorithm.model_copy(update={"old_logprobs": "learner"})  # one step: the ratio is 1, no pass is needed
    config = config.model_copy(update={"algorithm": own})
    algorithm = build_algorithm(config.algorithm, 1.0)
    engine = TorchEngine(policy, bench.device)
    return Iterations(bench, policy, engine, algorithm, Learner(policy, algorithm, config, bench.device), num_envs)


def busy_fractions(iterations: Iterations, plain: dict[str, float]) -> dict[str, float]:
    """The fraction of the time in which the GPU computes: kernels of a profiled iteration in the seconds of a plain one
    of the same size."""
    busy = iterations.busy_seconds(SHORT_DECISIONS)
    fractions = {part: busy[part] / plain[part] for part in busy}
    return fractions | {"iteration": sum(busy.values()) / sum(plain.values())}


def part_rows(
    bench: Bench,
    policy: Policy,
    found: Sequence[dict[str, float]],
    decisions: int,
    num_envs: int,
    microbatch: int,
    busy: dict[str, float],
) -> list[Row]:
    """A row for each part of the iterations."""
    model: BenchModel = policy.bench_model()
    rank = bench.request.rank if policy.has_adapter else None
    floors: dict[str, Callable[[], float]] = {
        "rollout": lambda: decisions // num_envs * bench.rates.floor(model.generation_work(num_envs, rank)),
        "update": lambda: (
            decisions // microbatch * bench.rates.floor(model.update_work(microbatch, rank, True))
            + (
                bench.rates.floor(model.update_work(decisions % microbatch, rank, True))
                if decisions % microbatch
                else 0
            )
        ),
    }
    return [
        Row(
            part,
            decisions,
            Timing(tuple(each[part] for each in found), None),
            floor_s=floors[part]() if part in floors else None,
            facts={"gpu_busy": busy.get(part)},
        )
        for part in PARTS
    ]


def _busy_note(busy: dict[str, float]) -> str:
    parts = ", ".join(f"{part} {busy[part]:.0%}" for part in ("rollout", "update"))
    return (
        f"GPU busy {busy['iteration']:.0%} ({parts}): kernels of an iteration of {SHORT_DECISIONS} decisions a slot, "
        "by torch.profiler, in the seconds of such an iteration without it."
    )
