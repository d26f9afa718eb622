"""Make and measure the base policy for LIBERO-Spatial: demonstrations, imitation, success from both kinds of states.

    python benchmarks/libero_base.py --out FOLDER [--record-minutes 3] [--train-minutes 4] [--episodes 20]

One command for the three stages, or one at a time with `--stages`:

    plan       measure how fast this machine simulates and renders on all cores, and how fast it trains; from that
               follow the number of demonstrations and of optimizer steps that fit into the given minutes
    finetune   `vlarl finetune libero_spatial_base` with these numbers
    evaluate   `vlarl eval` of the result, greedy and at temperature 1, from held-out states, and from training states

`--demonstrations` and `--steps` set the numbers instead, so that a run can be repeated. Results go into
`plan.json`, `summary.json` and `run/base` of the folder. Needs `pip install -e '.[libero]'`, LIBERO's assets
(docs/simulators.md), and a GPU for the training.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

PRESET = "libero_spatial_base"
SUITE = "libero_spatial"
STAGES = ("plan", "finetune", "evaluate")
MEAN_STEPS = 85  # of a demonstration
RESET_STEPS = 25  # what a reset takes, in steps
MEASURED_STEPS = 40
MEASURED_UPDATES = 12
MARGIN = 0.9  # of the minutes are planned with


@dataclass(frozen=True)
class Plan:
    """What fits into the given minutes, and what was measured for it."""

    demonstrations: int  # per task
    steps: int  # optimizer steps
    processes: int
    steps_per_s: float  # rendered environment steps of all processes together; 0: not measured
    samples_per_s: float  # of training; 0: not measured


@dataclass(frozen=True)
class Measured:
    """Success of the policy on some episodes."""

    states: str
    temperature: float
    won: int
    episodes: int
    by_task: tuple[int, ...]  # successes of each task
    mean_steps: float
    seconds: float


def main() -> None:
    """Run the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--record-minutes", type=float, default=3.0)
    parser.add_argument("--train-minutes", type=float, default=4.0)
    parser.add_argument("--demonstrations", type=int, help="per task; by default what fits")
    parser.add_argument("--most", type=int, default=150, help="demonstrations per task at most")
    parser.add_argument("--steps", type=int, help="optimizer steps; by default what fits")
    parser.add_argument("--episodes", type=int, default=20, help="per task and evaluation")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="other options of the preset")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    overrides = {name: yaml.safe_load(value) for name, value in (each.split("=", 1) for each in given.set)}
    stages: Mapping[str, Callable[[], None]] = {
        "plan": lambda: plan(given, overrides),
        "finetune": lambda: finetune(given.out, given.jobs, overrides),
        "evaluate": lambda: evaluate(given.out, given.jobs, given.episodes),
    }
    for stage in given.stages:
        begin = time.monotonic()
        say(f"stage {stage} begins")
        stages[stage]()
        say(f"stage {stage} took {time.monotonic() - begin:.0f} s")


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def plan(given: argparse.Namespace, overrides: Mapping[str, Any]) -> None:
    """Measure what is not given, and write `plan.json`."""
    from vlarl.config import FinetuneConfig, load_config

    config = load_config(PRESET, dict(overrides), schema=FinetuneConfig)
    rate = speed = 0.0
    demonstrations, steps = given.demonstrations, given.steps
    if demonstrations is None:
        rate = recording_speed(given.jobs, config.demos.image_size or 56)
        fit = rate * 60 * given.record_minutes * MARGIN / (10 * (MEAN_STEPS + RESET_STEPS))
        demonstrations = int(np.clip(fit, 2, given.most))
        say(f"{rate:.0f} rendered steps/s in {given.jobs} processes: {demonstrations} demonstrations per task")
    if steps is None:
        speed = training_speed(config)
        steps = int(max(20, speed * 60 * given.train_minutes * MARGIN / config.optim.batch_size))
        say(f"{speed:.0f} samples/s of training: {steps} optimizer steps")
    made = Plan(demonstrations, steps, given.jobs, rate, speed)
    (given.out / "plan.json").write_text(json.dumps(asdict(made), indent=2))


def recording_speed(jobs: int, size: int) -> float:
    """Rendered steps per second of all processes together, while all of them run."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes inherit it before they load NumPy
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        rates = pool.map(one_recorder, [(slot, size) for slot in range(jobs)], chunksize=1)
    return float(sum(rates))


def one_recorder(given: tuple[int, int]) -> float:
    """Rendered steps per second of this process: both views before every step."""
    from vlarl.config.schema import EnvConfig, GymConfig
    from vlarl.envs.build import build_factory
    from vlarl.types import Task

    slot, size = given
    factory = build_factory(EnvConfig(suite=SUITE, cameras=("agent", "wrist")), GymConfig(), size, "sparse")
    os.environ.update(factory.variables(slot))
    env = factory.build()
    expert = factory.build_expert(env)
    env.reset(Task(SUITE, slot % len(factory.spec.tasks), 0, slot))
    expert.reset()
    env.observe()
    begin = time.perf_counter()
    for _ in range(MEASURED_STEPS):
        env.observe()
        env.step(expert.act())
    rate = MEASURED_STEPS / (time.perf_counter() - begin)
    env.close()
    return rate


def training_speed(config: Any) -> float:
    """Samples per second of the preset's training, on random frames."""
    import torch

    from vlarl.data.finetune import start
    from vlarl.devices import choose_device
    from vlarl.policies.openvla.supervised import demo_rows
    from vlarl.training.optim import build_adamw
    from vlarl.training.sft import BETAS, DemoBatch, imitation_loss

    device, size = choose_device(config.run.device), config.optim.batch_size
    policy, _ = start(config, device)
    policy.add_statistics(SUITE, statistics())
    policy.use_statistics(None, SUITE)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (size, policy.num_steps, policy.action_dim)).astype(np.float32)
    states = rng.uniform(-1, 1, (size, policy.proprio_dim)).astype(np.float32)
    instruction = "pick up the black bowl between the plate and the ramekin and place it on the plate"
    rows = demo_rows(policy, [instruction] * size, states, actions).to(device)
    shape = (size, policy.num_images, policy.image_size, policy.image_size, 3)
    frames = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)).to(device)
    optimizer = build_adamw(policy.parameters(), 1e-6, 0.0, BETAS)
    policy.train()
    begin = 0.0
    for update in range(3 + MEASURED_UPDATES):
        if update == 3:
            begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = imitation_loss(policy, DemoBatch(rows, frames), config.optim)
        torch.autograd.backward(loss)
        optimizer.step()
        float(loss.detach())  # waits for the device
    return MEASURED_UPDATES * size / (time.perf_counter() - begin)


def statistics() -> dict[str, Any]:
    """Statistics under which actions and states of [-1, 1] stay as they are."""
    from vlarl.policies.tiny import PROPRIO_DIM, unit_statistics

    return unit_statistics((-1.0,) * PROPRIO_DIM, (1.0,) * PROPRIO_DIM)


def finetune(out: Path, jobs: int, overrides: Mapping[str, Any]) -> None:
    """Run `vlarl finetune` as planned."""
    import vlarl

    made = Plan(**json.loads((out / "plan.json").read_text()))
    options: dict[str, Any] = {
        "run.root": str(out / "run"),
        "run.name": "base",
        "demos.episodes_per_task": made.demonstrations,
        "demos.num_workers": jobs,
        "optim.steps": made.steps,
        "optim.warmup_steps": min(300, made.steps // 10),
        **overrides,
    }
    summary = vlarl.finetune(PRESET, options)
    say(f"{summary.demo_success:.1%} of the demonstrations succeed; loss {summary.last_loss:.3f}: {summary.checkpoint}")


def evaluate(out: Path, jobs: int, episodes: int) -> None:
    """Measure the checkpoint; each row is written at once."""
    checkpoint = out / "run" / "base" / "checkpoints" / "final"
    rows: list[Measured] = []
    for states, protocol, temperature in (
        ("held-out", "disjoint", 0.0),
        ("held-out", "disjoint", 1.0),
        ("training", "benchmark", 0.0),
    ):
        rows.append(success(checkpoint, states, protocol, temperature, episodes, jobs))
        last = rows[-1]
        how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        say(f"{states} states, {how}: {last.won}/{last.episodes}, by task {last.by_task}, {last.seconds:.0f} s")
        (out / "summary.json").write_text(json.dumps([asdict(row) for row in rows], indent=2))


def success(checkpoint: Path, states: str, protocol: str, temperature: float, episodes: int, jobs: int) -> Measured:
    """Success from the first states of a protocol: the benchmark's first 30 of each task are those of training."""
    import vlarl

    begin = time.monotonic()
    result = vlarl.evaluate(
        checkpoint, SUITE, episodes=episodes, temperature=temperature, num_envs=jobs, protocol=protocol
    )
    tasks = sorted({each.task.task_id for each in result.counted})
    by_task = tuple(sum(each.success for each in result.counted if each.task.task_id == task) for task in tasks)
    steps = float(np.mean([each.length for each in result.counted]))
    return Measured(states, temperature, result.won, len(result.counted), by_task, steps, time.monotonic() - begin)


if __name__ == "__main__":
    main()
