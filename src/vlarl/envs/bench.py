"""How fast the built-in environment runs: the work behind `vlarl bench env`."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.types import FloatArray, Task

CHUNK = 4


@dataclass(frozen=True)
class EnvBenchResult:
    """Environment steps a second on one core, with random actions and resets included."""

    suite: str
    num_envs: int
    image_size: int
    env_steps_per_s: float  # rendered at every step
    unrendered_steps_per_s: float
    chunked_steps_per_s: float  # chunks of `CHUNK` actions, rendered once a chunk


def bench_env(
    suite: str = "tabletop_spatial", num_envs: int = 64, image_size: int = 64, steps: int = 100, seed: int = 0
) -> EnvBenchResult:
    """Step `num_envs` environments `steps` times each in three ways and time them."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-1, 1, (steps, num_envs, 7)).astype(np.float32)
    pool = TabletopPool(suite, num_envs, image_size)
    _run_chunks(pool, actions[:CHUNK], 1)  # warm up: sprites are painted at first sight
    return EnvBenchResult(
        suite=suite,
        num_envs=num_envs,
        image_size=image_size,
        env_steps_per_s=_run_chunks(pool, actions, 1),
        unrendered_steps_per_s=_run_unrendered(pool, actions),
        chunked_steps_per_s=_run_chunks(pool, actions, CHUNK),
    )


def _task(pool: TabletopPool, slot: int, episode: int) -> Task:
    states = pool.spec.train_states
    return Task(pool.spec.name, (slot + episode) % len(pool.spec.tasks), states[(slot + episode) % len(states)], seed=0)


def _run_chunks(pool: TabletopPool, actions: FloatArray, chunk: int) -> float:
    slots = list(range(pool.num_envs))
    pool.reset(slots, [_task(pool, slot, 0) for slot in slots])
    executed = 0
    begin = time.perf_counter()
    for first in range(0, len(actions) - chunk + 1, chunk):
        outcomes = pool.step_chunk(slots, actions[first : first + chunk].transpose(1, 0, 2))
        executed += sum(outcome.num_executed for outcome in outcomes)
        ended = [slot for slot in slots if outcomes[slot].terminated or outcomes[slot].truncated]
        pool.reset(ended, [_task(pool, slot, first + 1) for slot in ended])
    return executed / (time.perf_counter() - begin)


def _run_unrendered(pool: TabletopPool, actions: FloatArray) -> float:
    slots = np.arange(pool.num_envs)
    pool.start(slots.tolist(), [_task(pool, slot, 0) for slot in slots.tolist()])
    begin = time.perf_counter()
    for step, action in enumerate(actions):
        _, success, truncated = pool.step(slots, action)
        ended = np.flatnonzero(success | truncated).tolist()
        pool.start(ended, [_task(pool, slot, step + 1) for slot in ended])
    return int(actions.shape[0] * actions.shape[1]) / (time.perf_counter() - begin)
