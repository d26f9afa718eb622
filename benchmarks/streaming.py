"""Streaming rollouts versus waiting for the slowest episode of each batch: environment steps a second, in one run.

    PYTHONPATH=benchmarks python benchmarks/streaming.py [--in-process] [--iterations 20] [--max-staleness 1] …

Two asynchronous runs, one after the other, of environments that sleep: a quarter of the states have episodes that are
ten times as long. `waiting` begins a batch when all episodes of the one before have ended, as vlarl did before its
rollouts were a stream; everything else is the same. Prints JSON.

By default both are training runs on a Ray cluster of this machine (skewed_env.py); their updates must be shorter than
their rollouts, so the machine must have nothing else to do. With --in-process, the source of rollouts and the collector
are real, and the environments and the updates only sleep (skewed_pool.py): other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from skewed_pool import IdleEngine, IdlePolicy, SkewedPool, SkewedSampler

import vlarl.loop
from vlarl.config.schema import RolloutConfig
from vlarl.config.source.load import load_config
from vlarl.decisions import Sampling
from vlarl.interrupt import InterruptGuard
from vlarl.observability.clock import Stopwatch
from vlarl.observability.trace import NoTrace
from vlarl.rollout.ahead import Calls, RolloutsAhead
from vlarl.rollout.collector import Collector
from vlarl.rollout.outstanding import Delivery, OutstandingGroups
from vlarl.rollout.selection import GroupRule
from vlarl.rollout.statistics import staleness_metrics
from vlarl.types import Rollout

WARM_UP = 2  # iterations, in which the pipeline fills


class WholeBatches(OutstandingGroups):
    """Admits a batch when every group of the one before is complete."""

    @property
    def wants_batch(self) -> bool:
        """Whether the next batch is admitted."""
        running = self.num_outstanding - self._num_training - self.num_waiting
        return running == 0 and super().wants_batch


def options(arguments: argparse.Namespace, root: str, name: str) -> dict[str, Any]:
    """A run of the skewed environment."""
    return {
        "run.name": name,
        "run.root": root,
        "run.iterations": arguments.iterations,
        "run.num_threads": 1,
        "run.device": "cpu",
        "policy.path": "builtin:tiny-oft",
        "env.suite": "gym",
        "env.task_ids": None,
        "env.num_envs": arguments.num_envs,
        "env.max_steps": 1000,
        "gym.env": "skewed_env:Skewed",
        "gym.kwargs": {"sleep_s": arguments.sleep_s},
        "gym.images": ("pixels", "pixels"),
        "gym.instructions": ("wait",),
        "rollout.num_groups": arguments.num_groups,
        "rollout.group_size": arguments.group_size,
        "algorithm.name": "reinforce",
        "optim.lr": 1e-6,
        "optim.minibatches": 1,
        "eval.interval": 0,
        "eval.states_per_task": 1,
        "eval.videos": 0,
        "checkpoint.interval": 0,
        "checkpoint.best_return": False,
        "logging.tensorboard": False,
        "logging.report": False,
        "distributed.backend": "ray",
        "distributed.asynchronous": True,
        "distributed.max_staleness": arguments.max_staleness,
        "distributed.worker_cpus": 0.1,
    }


def measured(folder: Path) -> dict[str, float]:
    """Environment steps a second after the warm-up, and what says why."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    first, steady = rows[WARM_UP], rows[WARM_UP + 1 :]
    seconds = sum(row["time/iteration"] - row.get("time/evaluation", 0.0) for row in steady)
    steps = steady[-1]["rollout/total_env_steps"] - first["rollout/total_env_steps"]

    def mean(name: str) -> float:
        return round(sum(row[name] for row in steady) / len(steady), 3)

    return {
        "env_steps_per_s": round(steps / seconds, 1),
        "seconds": round(seconds, 1),
        "iteration_s": round(seconds / len(steady), 2),
        "update_s": mean("time/update"),
        "waited_for_stragglers_s": mean("rollout/waited_for_stragglers_s"),
        "staleness_mean": mean("train/staleness_mean"),
        "staleness_max": max(row["train/staleness_max"] for row in rows[1:]),
    }


def in_process(kind: type[OutstandingGroups], arguments: argparse.Namespace) -> dict[str, float]:
    """Rollouts whose environments sleep, and updates that sleep for as long as two decisions."""
    config = RolloutConfig(num_groups=arguments.num_groups, group_size=arguments.group_size)
    groups = kind(config, GroupRule(config, lambda members: True), arguments.max_staleness, arguments.iterations)
    engine, sampler = IdleEngine(), SkewedSampler(config.num_groups, config.group_size)
    collector: Any = Collector(SkewedPool(arguments.num_envs, arguments.sleep_s), IdlePolicy(), engine)  # type: ignore[arg-type]

    def report(iteration: int, delivery: Delivery, seconds: dict[str, float]) -> Rollout:
        steps = sum(trajectory.length for trajectory in delivery.trajectories)
        kept, metrics = delivery.kept, delivery.metrics
        return Rollout(iteration, delivery.trajectories, kept, metrics, {}, {}, seconds, steps, delivery.outstanding)

    calls = Calls(lambda episodes, check: episodes, report)
    rest: Any = sampler, Sampling(1.0), calls, InterruptGuard(), lambda track: Stopwatch(NoTrace(), track)
    steps, waited_s, ages = 0, 0.0, []
    with RolloutsAhead(groups, collector, *rest) as source:
        for iteration in range(1, arguments.iterations + 1):
            rollout = source.get(iteration)
            if iteration > WARM_UP:
                steps += rollout.env_steps
                waited_s += rollout.metrics["rollout/waited_for_stragglers_s"]
            ages.append(staleness_metrics(rollout.kept, engine.version)["train/staleness_max"])
            if iteration == WARM_UP:
                began = time.monotonic()
            time.sleep(2 * arguments.sleep_s)
            engine.version += 1
            source.updated()
        seconds = time.monotonic() - began
    return {
        "env_steps_per_s": round(steps / seconds, 1),
        "seconds": round(seconds, 1),
        "waited_for_stragglers_s": round(waited_s / (arguments.iterations - WARM_UP), 3),
        "staleness_max": max(ages),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--sleep-s", type=float, default=0.1, help="seconds of a step, or of a decision in process")
    parser.add_argument("--in-process", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as root:
        for name, kind in (("waiting", WholeBatches), ("streaming", OutstandingGroups)):
            if arguments.in_process:
                found[name] = in_process(kind, arguments)
                continue
            vars(vlarl.loop)["OutstandingGroups"] = kind
            vlarl.loop.train(load_config("tabletop_grpo", options(arguments, root, name)))
            found[name] = measured(Path(root) / name)
    ratio = found["streaming"]["env_steps_per_s"] / found["waiting"]["env_steps_per_s"]
    print(json.dumps({**vars(arguments), **found, "ratio": round(ratio, 2)}, indent=2))


if __name__ == "__main__":
    main()
