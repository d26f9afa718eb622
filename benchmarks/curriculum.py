"""Uniform versus adaptive sampling of tasks on a suite of mixed difficulty: episodes until a success rate is reached.

    python benchmarks/curriculum.py FOLDER [--seeds 0 1 2] [--iterations 16] [--device auto] [--jobs 3]

Every run starts from the same base with the same options and budget, and is evaluated every other iteration on the same
unseen states. Prints a table; FOLDER, a new one, gets the runs, results.json and curve.svg.
Unknown flags are passed to `vlarl train`, for all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vlarl.observability.machine import describe_machine
from vlarl.observability.report import Line, write_comparison
from vlarl.observability.run_dir import RunDirectory

MODES: dict[str, dict[str, object]] = {
    "uniform": {},
    "adaptive": {"curriculum.mode": "adaptive"},
}
KINDS = {"adaptive": "main", "uniform": "train"}  # colours of the curves
WINDOW = 2  # evaluations in the moving average of success

Curve = list[tuple[int, float]]  # training episodes so far, success on unseen states


def main() -> None:
    args = parse_arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    jobs = [(mode, seed) for seed in args.seeds for mode in MODES]
    with ThreadPoolExecutor(args.jobs) as pool:
        curves = dict(zip(jobs, pool.map(lambda job: train(args, *job), jobs), strict=True))
    results = {
        "suite": args.suite,
        "policy": args.policy,
        "iterations": args.iterations,
        "flags": args.more,
        "threshold": args.threshold,
        "machine": describe_machine(),
        "modes": {mode: summarise({seed: curves[mode, seed] for seed in args.seeds}, args.threshold) for mode in MODES},
    }
    (args.folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    write_comparison(
        args.folder / "curve.svg",
        "Success on unseen states over training episodes",
        f"{args.suite}, {args.policy}, mean and range of {len(args.seeds)} seeds",
        [mean_line(mode, [curves[mode, seed] for seed in args.seeds]) for mode in MODES],
    )
    print_table(results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--num-groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--suite", default="tabletop_goal")
    parser.add_argument("--policy", default="builtin:tiny-openvla")
    parser.add_argument("--states-per-task", type=int, default=20)
    parser.add_argument("--threshold", type=float, default=0.8, help="success to reach, as a fraction")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args, args.more = parser.parse_known_args()
    return args


def train(args: argparse.Namespace, mode: str, seed: int) -> Curve:
    """One run in a process of its own; returns the curve from its metrics."""
    name = f"{mode}_seed{seed}"
    options = MODES[mode] | {
        "run.root": args.folder / "runs",
        "run.name": name,
        "run.seed": seed,
        "run.iterations": args.iterations,
        "run.device": args.device,
        "run.num_threads": max(1, (os.cpu_count() or 1) // args.jobs),
        "env.suite": args.suite,
        "policy.path": args.policy,
        "rollout.num_groups": args.num_groups,
        "rollout.group_size": args.group_size,
        "eval.interval": 2,
        "eval.states_per_task": args.states_per_task,
        "eval.videos": 0,
        "checkpoint.interval": 0,
        "checkpoint.best_return": "false",
        "logging.tensorboard": "false",
    }
    flags = [text for path, value in options.items() for text in (f"--{path}", str(value))]
    command = [sys.executable, "-m", "vlarl.cli", "train", "tabletop_grpo", *flags, *args.more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout}{done.stderr}")
    print(f"{name}: done", flush=True)
    return read_curve(RunDirectory(args.folder / "runs" / name))


def read_curve(run: RunDirectory) -> Curve:
    curve: Curve = []
    episodes = 0
    for row in run.read_metrics():
        episodes += round(row.get("rollout/num_trajectories", 0) + row.get("rollout/num_crashed", 0))
        if "val/success_rate" in row:
            curve.append((episodes, row["val/success_rate"]))
    return curve


def summarise(curves: dict[int, Curve], threshold: float) -> dict[str, Any]:
    return {
        "curves": curves,
        "episodes_to_threshold": {seed: episodes_to(curve, threshold) for seed, curve in curves.items()},
        "mean_success": {seed: mean(success for _, success in curve) for seed, curve in curves.items()},
        "final_success": {seed: moving(curve)[-1][1] for seed, curve in curves.items()},
    }


def moving(curve: Curve) -> Curve:
    """The mean of each evaluation and those before it, `WINDOW` in total."""
    return [
        (curve[i][0], mean(success for _, success in curve[max(0, i + 1 - WINDOW) : i + 1])) for i in range(len(curve))
    ]


def episodes_to(curve: Curve, threshold: float) -> int | None:
    """Training episodes at the first evaluation where the moving success reaches the threshold, if any."""
    return next((episodes for episodes, success in moving(curve) if success >= threshold), None)


def mean_line(mode: str, curves: list[Curve]) -> Line:
    """All seeds evaluate after equally many episodes, so points can be averaged one by one."""
    points = [(mean(e for e, _ in at), [success for _, success in at]) for at in zip(*curves, strict=False)]
    return Line(
        mode,
        [(x, mean(values)) for x, values in points],
        KINDS[mode],
        has_dots=True,
        intervals=[(x, min(values), max(values)) for x, values in points],
    )


def print_table(results: dict[str, Any]) -> None:
    reach = f"episodes to {results['threshold']:.0%}"
    print(f"\n{results['suite']}, {results['policy']}, {results['iterations']} iterations, {results['machine']}")
    print(f"{'':10}  {reach:>22}  {'mean success':>16}  {'final success':>16}")
    for mode, row in results["modes"].items():
        reached = row["episodes_to_threshold"].values()
        needed = ", ".join("never" if n is None else str(n) for n in reached)
        cells = (mean_and_std(list(row[name].values())) for name in ("mean_success", "final_success"))
        print(f"{mode:10}  {needed:>22}  " + "  ".join(f"{cell:>16}" for cell in cells))
    needed = [list(row["episodes_to_threshold"].values()) for row in results["modes"].values()]
    if all(n for seeds in needed for n in seeds):
        uniform, adaptive = (mean(seeds) for seeds in needed)
        print(f"adaptive needed {adaptive / uniform:.0%} of the episodes ({adaptive:.0f} against {uniform:.0f})")


def mean_and_std(values: list[float]) -> str:
    return f"{mean(values):.1%} ± {stdev(values):.1%}" if len(values) > 1 else f"{values[0]:.1%}"


if __name__ == "__main__":
    main()
