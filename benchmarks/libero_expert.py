"""Successes of LIBERO's scripted expert by task, from every initial state, physics only. Prints a table.

    python benchmarks/libero_expert.py [--suite libero_spatial] [--tasks 0 1] [--states 0 49] [--noise 0.1]
        [--close-high 0.2] [--release-early 0.5] [--jobs 2]

Nothing is rendered, which makes this many times faster than `vlarl data record`; the episodes have the suite's time
limit, and the noise of a recording. `--out FILE` also writes one JSON line for each episode.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vlarl.envs.base import ExpertFlaws
from vlarl.envs.libero.assets import find_assets
from vlarl.envs.libero.env import LiberoEnv
from vlarl.envs.libero.expert import LiberoExpert, supports
from vlarl.envs.libero.suites import libero_spec
from vlarl.rollout.tasks import derive_seed
from vlarl.types import Task


@dataclass(frozen=True)
class Unit:
    """The episodes of one task."""

    suite: str
    task_id: int
    states: tuple[int, ...]
    flaws: ExpertFlaws
    seed: int


@dataclass(frozen=True)
class Played:
    """An episode of the expert."""

    task_id: int
    state: int
    success: bool
    steps: int
    seconds: float


def play(unit: Unit) -> list[Played]:
    """Play the episodes of a task, one after the other."""
    spec = libero_spec(unit.suite, None)
    env = LiberoEnv(spec, find_assets(None), ("agent",), 64, False)
    try:
        return list(_episodes(env, unit, spec.tasks[unit.task_id].max_steps))
    finally:
        env.close()


def _episodes(env: LiberoEnv, unit: Unit, limit: int) -> Iterator[Played]:
    expert = LiberoExpert(env)
    for state in unit.states:
        task = Task(unit.suite, unit.task_id, state, derive_seed(unit.seed, unit.task_id, state))
        begin, success, steps = time.perf_counter(), False, 0
        env.reset(task)
        expert.reset()
        expert.err(unit.flaws.mistakes(task.seed))
        rng = np.random.default_rng(task.seed)
        while not success and not expert.finished and steps < limit:
            action = expert.act()
            action[:6] += rng.normal(0.0, unit.flaws.action_noise, 6).astype(np.float32)
            success, steps = env.step(action).success, steps + 1
        yield Played(unit.task_id, state, success, steps, time.perf_counter() - begin)


def table(played: Sequence[Played], trained: frozenset[int]) -> str:
    """Successes of each task, from training states and from the others, and the states that fail."""
    lines = [f"{'task':>4}  {'training':>8}  {'others':>7}  {'steps':>5}  failed states"]
    for task_id in [*sorted({each.task_id for each in played}), None]:
        rows = [each for each in played if task_id is None or each.task_id == task_id]
        won = [[each.success for each in rows if (each.state in trained) == among] for among in (True, False)]
        failed = " ".join(str(each.state) for each in rows if not each.success) if task_id is not None else ""
        steps = np.mean([each.steps for each in rows])
        counts = [f"{sum(part)}/{len(part)}" for part in won]
        name = "all" if task_id is None else task_id
        lines.append(f"{name:>4}  {counts[0]:>8}  {counts[1]:>7}  {steps:5.0f}  {failed}".rstrip())
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--tasks", type=int, nargs="+", help="by default all that the expert supports")
    parser.add_argument("--states", type=int, nargs=2, default=(0, 49), metavar=("FIRST", "LAST"))
    parser.add_argument("--noise", type=float, default=0.0, help="std of the noise on executed actions")
    parser.add_argument("--close-high", type=float, default=0.0, help="fraction of episodes that close too high")
    parser.add_argument("--release-early", type=float, default=0.0, help="fraction of episodes that release too early")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("MUJOCO_GL", "egl")
    os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
    spec = libero_spec(given.suite, None)
    tasks = given.tasks or [task.task_id for task in spec.tasks if supports(given.suite, task.task_id)]
    states = tuple(range(given.states[0], given.states[1] + 1))
    flaws = ExpertFlaws(given.close_high, given.release_early, given.noise)
    units = [Unit(given.suite, task_id, states, flaws, given.seed) for task_id in tasks]
    played: list[Played] = []
    with multiprocessing.get_context("spawn").Pool(min(given.jobs, len(units)), maxtasksperchild=1) as pool:
        for done in pool.imap_unordered(play, units, chunksize=1):
            played += done
            if given.out is not None:
                with given.out.open("a") as file:
                    file.writelines(json.dumps(asdict(each)) + "\n" for each in done)
    played.sort(key=lambda each: (each.task_id, each.state))
    print(table(played, frozenset(spec.train_states)))
    steps, seconds = sum(each.steps for each in played), sum(each.seconds for each in played)
    print(f"{steps:,} steps, {steps / seconds:.0f} a second in each process, with resets and planning")


if __name__ == "__main__":
    main()
