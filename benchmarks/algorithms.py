"""Every algorithm on the same tasks, from the same base, with the same number of episodes: success before and after.

    python benchmarks/algorithms.py FOLDER [--seeds 0 1 2] [--iterations 12] [--device auto] [--jobs 1]

FOLDER gets the runs, results.json and table.md; existing runs are reused. Unknown flags are passed to `vlarl train`,
for all runs.
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

import torch  # noqa: F401 - describe_machine names the GPU of a process that has loaded it

from vlarl.observability.machine import describe_machine

COMMON: dict[str, object] = {
    "eval.interval": 0,
    "eval.videos": 0,
    "checkpoint.interval": 0,
    "checkpoint.best_return": "false",
    "logging.tensorboard": "false",
    "logging.report": "false",
    "run.num_threads": 1,
}
# 128 episodes an iteration for all: 32 groups of 4, or 128 tasks for algorithms that don't compare within a group.
ALONE: dict[str, object] = {"rollout.num_groups": 128, "rollout.group_size": 1}
PPO: dict[str, object] = ALONE | {"algorithm.name": "ppo", "algorithm.value_init_steps": 1}

VARIANTS: dict[str, dict[str, object]] = {
    "GRPO": {},
    "GRPO without std (Dr. GRPO)": {"algorithm.normalize_std": "false"},
    "GSPO (ratio of the episode)": {"algorithm.ratio_level": "sequence", "algorithm.aggregate": "sequence_mean"},
    "RLOO": {"algorithm.name": "rloo"},
    "group norm": {"algorithm.name": "group_norm"},
    "CPGD": {"algorithm.name": "cpgd"},
    "REINFORCE": ALONE | {"algorithm.name": "reinforce"},
    "REINFORCE with baseline": {"algorithm.name": "reinforce_baseline"},
    "REINFORCE++": ALONE | {"algorithm.name": "reinforce_pp"},
    "PPO": PPO,
    "PPO, separate critic": PPO | {"critic.kind": "separate"},
    "GRPO, LoRA": {"lora.enabled": "true", "lora.rank": 16, "optim.lr": 1e-3},
    "GRPO, KL to the start": {"kl.coef": 0.01},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    args, more = parser.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    jobs = [(variant, seed) for seed in args.seeds for variant in args.only]
    with ThreadPoolExecutor(args.jobs) as pool:
        ends = dict(zip(jobs, pool.map(lambda job: train(args, more, *job), jobs), strict=True))
    results = {
        variant: [ends[variant, seed] for seed in args.seeds if ends[variant, seed] is not None]
        for variant in args.only
    }
    episodes = 128 * args.iterations
    content = {"machine": describe_machine(), "episodes": episodes, "seeds": args.seeds, "results": results}
    (args.folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    (args.folder / "table.md").write_text(table(results))
    print(table(results))


def train(args: argparse.Namespace, more: list[str], variant: str, seed: int) -> tuple[float, float] | None:
    """Greedy success before and after one run, in its own process; None if it failed, after printing its error."""
    name = "".join(c if c.isalnum() else "_" for c in variant) + f"_seed{seed}"
    run = args.folder / "runs" / name
    if not (run / "checkpoints" / "final").is_dir():
        options = COMMON | VARIANTS[variant] | {"run.iterations": args.iterations, "run.seed": seed}
        options |= {"run.root": args.folder / "runs", "run.name": name, "run.device": args.device}
        flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "vlarl.cli", "train", "tabletop_grpo", *flags, *more]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"{name} failed: {done.stderr.strip()[-400:]}", flush=True)
            return None
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [row["val/success_rate"] for row in rows if "val/success_rate" in row]
    print(f"{name}: {rates[0]:.1%} -> {rates[-1]:.1%}", flush=True)
    return rates[0], rates[-1]


def table(results: dict[str, list[tuple[float, float]]]) -> str:
    """Mean and std over the seeds, in Markdown."""
    lines = [
        "| algorithm | before | after, each seed | after, mean | std | gain |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for variant, ends in results.items():
        if not ends:
            lines.append(f"| {variant} | failed | | | | |")
            continue
        before, after = [e[0] for e in ends], [e[1] for e in ends]
        std = f"{stdev(after):.1%}" if len(after) > 1 else ""
        each = ", ".join(f"{a:.1%}" for a in after)
        gain = f"{100 * (mean(after) - mean(before)):+.1f} points"
        lines.append(f"| {variant} | {mean(before):.1%} | {each} | {mean(after):.1%} | {std} | {gain} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
