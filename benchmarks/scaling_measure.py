"""Short real runs versus the model: one gives the parameters, the others are predicted (scaling_model.py --measure).

Parameters come from metrics.jsonl, episodes.jsonl and trace.json of the run with one worker of each role, which is made
first and last: the shortest calls give the fixed part of a call, the rest is attributed to the rows. What one worker of
each role can't show comes from scaling_parts.py, and what Ray's own processes take of the cores from their processor
time. No run is an input of its own prediction but that one. All runs have the same episodes.

Runs of the built-in policy on the tabletop, torch engines, one thread a process. The processes counted are those that
work: the driver, and each Ray worker for environments, engines and learners (not Ray's own, and not the curriculum's,
which waits).

The machine must have nothing else to do: the last column is the fraction of the cores that other work took.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from scaling_model import Forecast, Loop, forecast
from scaling_parts import Parts, measured_parts

NUM_ENVS, NUM_EPISODES, ITERATIONS, MINIBATCHES, MICROBATCH = 8, 16, 4, 4, 32
WARM_UP = 1  # iterations that are not counted


@dataclass(frozen=True)
class Shape:
    """How a run is distributed over processes; 0 workers: everything in one process."""

    name: str
    workers: int  # of each role: environments, engines, learners
    asynchronous: bool = False
    microbatch: int = MICROBATCH
    turn: int = 1  # of a shape that is run more than once

    @property
    def run_name(self) -> str:
        """Of its directory."""
        return f"w{self.workers}a{self.asynchronous:d}m{self.microbatch}t{self.turn}"


BASE = Shape("1 + 1 + 1 workers, 4 processes", 1)
AGAIN = replace(BASE, name="the first run again", turn=2)
SHAPES = (
    BASE,
    Shape("local, 1 process", 0),
    Shape("the same, asynchronous", 1, True),
    Shape("2 + 2 + 2 workers, 7 processes", 2),
    Shape("the same, one microbatch a minibatch", 2, microbatch=128),
    AGAIN,
)
WORK = "work.json"  # in a run's directory: processor time


def run(shape: Shape, root: Path, iterations: int = ITERATIONS) -> Path:
    """Train for a few iterations; the run's directory."""
    from vlarl.callbacks import Callbacks, IterationRecord
    from vlarl.config.schema import Config
    from vlarl.loop import train

    workers = max(shape.workers, 1)
    config: dict[str, Any] = {
        "run": {
            "name": shape.run_name,
            "root": str(root),
            "device": "cpu",
            "num_threads": 1,
        },
        "env": {"suite": "tabletop_spatial", "num_envs": NUM_ENVS},
        "policy": {"path": "builtin:tiny-openvla"},
        "rollout": {"num_groups": NUM_EPISODES // 4, "group_size": 4, "temperature": 0.6},
        "algorithm": {"name": "reinforce"},  # it is trained on every decision
        "optim": {"lr": 1e-6, "minibatches": MINIBATCHES, "microbatch_size": shape.microbatch},
        "eval": {"interval": 0, "states_per_task": 1, "videos": 0},
        "checkpoint": {"interval": 0, "best_return": False},
        "logging": {"trace": True, "tensorboard": False, "report": False},
        "distributed": {
            "backend": "ray" if shape.workers else "local",
            "learners_per_node": (workers,),
            "torch_num_engines": workers,
            "num_env_workers": workers,
            "worker_cpus": 0.1,
            "asynchronous": shape.asynchronous,
        },
    }
    config["run"]["iterations"] = iterations
    meters: list[Meter] = []

    def noted(record: IterationRecord) -> None:
        if record.iteration in (WARM_UP, iterations):
            meters.append(Meter.now())

    train(Config.model_validate(config), callbacks=Callbacks(on_iteration=noted))
    (root / shape.run_name / WORK).write_text(json.dumps(asdict(meters[1].since(meters[0]))), encoding="utf-8")
    return root / shape.run_name


@dataclass(frozen=True)
class Meter:
    """Processor seconds of this process and all that it has started, and of the whole machine."""

    wall_s: float
    processes: dict[str, float]  # by process id
    rays_own: float  # of Ray's own processes, which run no worker's part
    machine: float

    @classmethod
    def now(cls) -> Meter:
        """Since each process began."""
        driver = psutil.Process()
        processes: dict[str, float] = {}
        rays_own = 0.0
        for process in (driver, *driver.children(recursive=True)):
            with suppress(psutil.Error):  # it has just ended
                times, is_worker = process.cpu_times(), "ray::Host" in " ".join(process.cmdline())
                processes[str(process.pid)] = times.user + times.system
                rays_own += 0.0 if is_worker or process == driver else times.user + times.system
        machine = psutil.cpu_times()
        used = machine.user + machine.nice + machine.system
        return cls(time.monotonic(), processes, rays_own, used)

    def since(self, before: Meter) -> Meter:
        """What was used between two of them; a process that ended in between counts for nothing."""
        processes = {pid: seconds - before.processes.get(pid, 0.0) for pid, seconds in self.processes.items()}
        rays_own = max(self.rays_own - before.rays_own, 0.0)
        return Meter(self.wall_s - before.wall_s, processes, rays_own, self.machine - before.machine)


def work_of(directory: Path) -> Meter:
    """What a run used after its warm-up."""
    return Meter(**json.loads((directory / WORK).read_text(encoding="utf-8")))


def other_work(directory: Path, cores: int) -> float:
    """The fraction of the cores that processes of others took."""
    work = work_of(directory)
    return max(work.machine - sum(work.processes.values()), 0.0) / work.wall_s / cores


def rows_of(directory: Path) -> list[dict[str, float]]:
    """The metrics of all iterations after the warm-up."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "time/rollout" in row][WARM_UP:]


def spans_of(directory: Path) -> dict[str, list[tuple[str, float, float]]]:
    """The spans of every track of the timeline: name, begin, end."""
    text = (directory / "trace.json").read_text(encoding="utf-8").strip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans: dict[str, list[tuple[str, float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            begin = event["ts"] / 1e6
            spans.setdefault(names[event["tid"]], []).append((event["name"], begin, begin + event["dur"] / 1e6))
    return spans


def lengths_of(directory: Path, decisions: float) -> tuple[int, ...]:
    """Decisions of each training episode after the warm-up; `decisions` of all of them. Only an episode's last decision
    may be cut short, so that steps over decisions, rounded up, are the steps of a decision."""
    rows = [json.loads(line) for line in (directory / "episodes.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row["length"] for row in rows if row["phase"] == "rollout" and row["iteration"] > WARM_UP]
    chunk = math.ceil(sum(steps) / decisions - 1e-6)
    return tuple(math.ceil(length / chunk) for length in steps)


def fixed_and_each(durations: Sequence[float], num_rows: float) -> tuple[float, float]:
    """The fixed cost of a call and that of each row: the shortest calls, those of the last episodes, have few rows."""
    fixed = float(np.quantile(durations, 0.02))
    return fixed, max(sum(durations) - fixed * len(durations), 0.0) / num_rows


def parameters(directory: Path, cores: int, parts: Parts) -> Loop:
    """The model's inputs from the run with one worker of each role, and from parts that were measured alone."""
    work = work_of(directory)
    rows, spans = rows_of(directory), spans_of(directory)
    inside = [(begin, end) for name, begin, end in spans["loop"] if name == "rollout"][WARM_UP:]
    decisions = float(np.mean([row["perf/decisions_per_s"] * row["time/rollout"] for row in rows]))

    def during(track: str, *names: str) -> list[tuple[float, float]]:
        spanned = [(begin, end) for name, begin, end in spans[track] if name in names]
        return [span for span in spanned if any(b <= span[0] and span[1] <= e for b, e in inside)]

    steps, resets = during("environments 0", "step"), during("environments 0", "reset")
    decided = during("engine 0", "generate")
    total = decisions * len(inside)
    env_fixed, env_chunk = fixed_and_each([end - begin for begin, end in steps], total)
    engine_fixed, engine_row = fixed_and_each([end - begin for begin, end in decided], total)
    working = sorted([*steps, *resets, *decided])
    gaps = [after[0] - before[1] for before, after in zip(working, working[1:], strict=False)]
    gaps = [gap for gap in gaps if 0 < gap < 1.0]  # not the pause between two rollouts
    gap_fixed, gap_row = fixed_and_each(gaps, total)
    first = inside[0][0]
    learning = [span for span in spans["learner 0"] if span[0] in ("annotate", "updating") and span[1] > first]
    updating = sum(end - begin for _, begin, end in learning)
    lengths = lengths_of(directory, total)
    resetting = sum(end - begin for begin, end in resets) - env_fixed * len(resets)
    syncs = [end - begin for name, begin, end in spans["learner 0"] if name == "send_weights" and begin > first]
    update = sum(row["time/update"] for row in rows)
    return Loop(
        env_workers=1,
        slots=NUM_ENVS,
        cores=cores - work.rays_own / work.wall_s,
        crowding=parts.crowding,
        decisions=round(decisions),
        episodes=NUM_EPISODES,
        lengths=lengths,
        env_fixed_s=env_fixed,
        env_chunk_s=env_chunk,
        reset_s=max(resetting, 0.0) / len(lengths),
        engine_fixed_s=engine_fixed,
        engine_row_s=engine_row,
        driver_call_s=gap_fixed * len(gaps) / max(len(decided), 1),
        driver_more_s=parts.further_call_s,
        driver_row_s=gap_row,
        update_s=updating / total,
        batch_s=max(update - updating, 0.0) / total,
        minibatches=MINIBATCHES,
        microbatch=MICROBATCH,
        gradient_bytes=rows[0]["sync/bytes"],  # what is sent is what is trained
        steps=MINIBATCHES,
        ring_bytes_per_s=parts.ring_bytes_per_s,
        sync_fixed_s=float(np.mean(syncs)),
        commit_s=rows[0]["sync/bytes"] / parts.copy_bytes_per_s,
        engines_on_cores=True,
        learners_on_cores=True,
        iterations=ITERATIONS,
    )


def averaged(first: Loop, again: Loop) -> Loop:
    """The mean of what two runs of the same shape give, with the episodes of the first."""
    numbers = {name: value for name, value in vars(first).items() if isinstance(value, float)}
    return replace(first, **{name: (value + getattr(again, name)) / 2 for name, value in numbers.items()})


def predicted(base: Loop, shape: Shape) -> Forecast:
    """The model's prediction for another shape, from the base's parameters."""
    if shape.workers == 0:  # in one process calls and syncs cost nothing, and nothing runs concurrently
        return forecast(replace(base, driver_call_s=0.0, sync_fixed_s=0.0, cores=1.0, crowding=1.0))
    return forecast(
        replace(
            base,
            env_workers=shape.workers,
            slots=NUM_ENVS // shape.workers,
            engines=shape.workers,
            ranks=shape.workers,
            microbatch=shape.microbatch,
            max_staleness=int(shape.asynchronous),
            staged=shape.asynchronous,
        )
    )


def measure(folder: str) -> str:
    """Run all shapes that the folder does not have yet, and compare; without a folder they are not kept."""
    with nullcontext(folder) if folder else tempfile.TemporaryDirectory() as name:
        return compare(Path(name))


def compare(root: Path) -> str:
    """Run all shapes, and tabulate the model's predictions beside the measurements."""
    cores, file = len(os.sched_getaffinity(0)), root / "parts.json"
    root.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(json.dumps(asdict(measured_parts(cores))), encoding="utf-8")
    parts = Parts(**json.loads(file.read_text(encoding="utf-8")))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        directories = {
            shape: root / shape.run_name if (root / shape.run_name / WORK).exists() else pool.apply(run, (shape, root))
            for shape in SHAPES
        }
    base = averaged(*(parameters(directories[shape], cores, parts) for shape in (BASE, AGAIN)))
    lines = [
        "| run | rollout s | predicted | update s | predicted | iteration s | predicted | error | other work |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    errors: dict[str, float] = {}
    for shape, directory in directories.items():
        rows, model = rows_of(directory), predicted(base, shape)
        times = {key: mean_of(rows, f"time/{key}") for key in ("rollout", "update", "iteration", "evaluation")}
        whole = times["iteration"] - times["evaluation"]
        errors[shape.name] = model.iteration_s / whole - 1
        # an asynchronous rollout overlaps with others: how long one of them takes says nothing about the iteration
        rollout = ("", "") if shape.asynchronous else (f"{times['rollout']:.2f}", f"{model.rollout_s:.2f}")
        lines.append(
            f"| {shape.name} | {rollout[0]} | {rollout[1]} | {times['update']:.2f} | "
            f"{model.batch_s + model.update_s:.2f} | {whole:.2f} | {model.iteration_s:.2f} | "
            f"{errors[shape.name]:+.0%} | {other_work(directory, cores):.0%} |"
        )
    worst = max(errors, key=lambda shape: abs(errors[shape]))
    given = ", ".join(f"{key} {value:.4g}" for key, value in vars(base).items() if key.endswith("_s") and value)
    lines += [
        "",
        f"The largest error is {errors[worst]:+.1%} ({worst}). {cores} cores, of which Ray's own processes take "
        f"{cores - base.cores:.2f}; crowding {base.crowding:.2f}. Parameters, from '{BASE.name}' and scaling_parts.py: "
        f"{given}.",
    ]
    return "\n".join(lines)


def mean_of(rows: Sequence[dict[str, float]], key: str) -> float:
    """Of the iterations after the warm-up; 0 where it was not recorded."""
    return float(np.mean([row.get(key, 0.0) for row in rows]))
