"""Synchronous versus asynchronous training: time per iteration and success, over several seeds. Prints a table or JSON.

    python benchmarks/async_loop.py [--seeds 0 1 2] [--iterations 10] [--json] [--section.field value …]

Both run on a Ray cluster of this machine with one learner, one torch engine and two environment workers of one thread
each: two cores are enough for a rollout and an update at the same time. The time excludes the first two iterations, the
last one, and evaluations. Further options apply to both runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

COMMON = [
    *("--distributed.backend", "ray", "--run.num_threads", "1", "--run.device", "cpu"),
    *("--env.task_ids", "0", "3", "--env.num_envs", "24"),
    *("--rollout.num_groups", "6", "--rollout.group_size", "4", "--optim.minibatches", "2", "--algorithm.epochs", "1"),
    *("--eval.interval", "0", "--eval.states_per_task", "10", "--eval.videos", "0", "--checkpoint.interval", "0"),
    *("--no-logging.report", "--no-logging.tensorboard", "--no-checkpoint.best_return"),
]
WARM_UP = 2  # iterations, in which the pipeline fills


@dataclass(frozen=True)
class Row:
    """One run."""

    mode: str
    seed: int
    rollout_s: float
    update_s: float
    iteration_s: float
    staleness: float
    success_before: float
    success_after: float


def run(mode: str, seed: int, iterations: int, root: Path, more: list[str]) -> Row:
    name = f"{mode}-{seed}"
    command = [sys.executable, "-m", "vlarl.cli", "train", "tabletop_grpo", *COMMON]
    command += ["--run.root", str(root), "--run.name", name, "--run.seed", str(seed)]
    command += ["--run.iterations", str(iterations), *more]
    command += ["--distributed.asynchronous"] if mode == "asynchronous" else []
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
    rows = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    steady = rows[1 + WARM_UP : -1]

    def mean(key: str) -> float:
        return sum(row.get(key, 0.0) for row in steady) / len(steady)

    return Row(
        mode=mode,
        seed=seed,
        rollout_s=mean("time/rollout"),
        update_s=mean("time/update"),
        iteration_s=mean("time/iteration"),
        staleness=mean("train/staleness_mean"),
        success_before=rows[0]["val/success_rate"],
        success_after=rows[-1]["val/success_rate"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments, more = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for mode in ("synchronous", "asynchronous"):
                rows.append(run(mode, seed, arguments.iterations, Path(folder), more))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'':14}{'seed':>5}{'rollout s':>11}{'update s':>10}{'iteration s':>13}{'staleness':>11}{'success':>18}")
    for row in rows:
        change = f"{row.success_before:.1%} -> {row.success_after:.1%}"
        print(
            f"{row.mode:14}{row.seed:5}{row.rollout_s:11.2f}{row.update_s:10.2f}{row.iteration_s:13.2f}"
            f"{row.staleness:11.2f}{change:>18}"
        )


if __name__ == "__main__":
    main()
