"""How fast environments run: the work behind `vlarl bench env`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.envs.base import EnvPool, Expert, SingleEnv, StepOutcome, SuiteSpec
from vlarl.envs.build import build_factory
from vlarl.envs.libero import LiberoFactory
from vlarl.envs.libero.stock import restart, stock_env
from vlarl.envs.process_pool import WorkerPool
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.types import FloatArray, Observation, Task, UInt8Array

CHUNK = 4
STOCK_STEPS = 20


@dataclass(frozen=True)
class TabletopSpeed:
    """Environment steps a second on one core, with random actions and resets included."""

    suite: str
    num_envs: int
    image_size: int
    env_steps_per_s: float  # rendered at every step
    unrendered_steps_per_s: float
    chunked_steps_per_s: float  # chunks of `CHUNK` actions, rendered once a chunk


@dataclass(frozen=True)
class SimulatorSpeed:
    """Environment steps a second of a simulator in processes, with random actions, rendered once a chunk."""

    suite: str
    image_size: int
    chunk: int
    num_cameras: int
    first_reset_s: float  # process, imports and simulator included
    reset_s: float  # another episode of the same task
    steps_per_s: Mapping[int, float]  # by the number of processes
    stock_steps_per_s: (
        float | None
    )  # the package's own environment, two cameras rendered in every step; None: there is none


def bench_tabletop(
    suite: str = "tabletop_spatial", num_envs: int = 64, image_size: int = 64, steps: int = 100, seed: int = 0
) -> TabletopSpeed:
    """Step `num_envs` environments `steps` times each in three ways and time them."""
    actions = np.random.default_rng(seed).uniform(-1, 1, (steps, num_envs, 7)).astype(np.float32)
    pool = TabletopPool(suite, num_envs, image_size)
    _run_chunks(pool, actions[:CHUNK], 1)  # warm up: sprites are painted when first used
    return TabletopSpeed(
        suite=suite,
        num_envs=num_envs,
        image_size=image_size,
        env_steps_per_s=_run_chunks(pool, actions, 1),
        unrendered_steps_per_s=_run_unrendered(pool, actions),
        chunked_steps_per_s=_run_chunks(pool, actions, CHUNK),
    )


def bench_simulator(
    env: EnvConfig, num_envs: Sequence[int], image_size: int, steps: int, chunk: int, seed: int = 0
) -> SimulatorSpeed:
    """Time `num_envs` simulators in parallel, each count in turn, for `steps` steps, and LIBERO's own environment."""
    factory = build_factory(env, GymConfig(), image_size, "sparse")
    first_resets: list[float] = []
    resets: list[float] = []
    speeds: dict[int, float] = {}
    for count in num_envs:
        actions = _random_actions(factory.spec, (steps, count), seed)
        with closing(WorkerPool(factory, count, env.timeout_s, lockstep=True)) as pool:
            first_resets.append(_timed_reset(pool))
            resets.append(_timed_reset(pool))
            speeds[count] = _run_chunks(pool, actions, chunk, restart=False)
    return SimulatorSpeed(
        suite=env.suite,
        image_size=image_size,
        chunk=chunk,
        num_cameras=factory.image_shape[0],
        first_reset_s=first_resets[0],
        reset_s=min(resets),
        steps_per_s=speeds,
        stock_steps_per_s=_bench_stock(factory, image_size, seed) if isinstance(factory, LiberoFactory) else None,
    )


def _random_actions(spec: SuiteSpec, shape: tuple[int, ...], seed: int) -> FloatArray:
    return np.random.default_rng(seed).uniform(-1, 1, (*shape, spec.action_dim)).astype(np.float32)


def _task(pool: EnvPool, slot: int, episode: int) -> Task:
    states = pool.spec.train_states
    return Task(pool.spec.name, (slot + episode) % len(pool.spec.tasks), states[(slot + episode) % len(states)], seed=0)


def _timed_reset(pool: EnvPool) -> float:
    slots = list(range(pool.num_envs))
    begin = time.perf_counter()
    pool.reset(slots, [_task(pool, slot, 0) for slot in slots])
    return time.perf_counter() - begin


def _run_chunks(pool: EnvPool, actions: FloatArray, chunk: int, restart: bool = True) -> float:
    """Steps a second; with `restart` an ended episode is followed by one of another task, else of the same task."""
    slots = list(range(pool.num_envs))
    pool.reset(slots, [_task(pool, slot, 0) for slot in slots])
    executed = 0
    begin = time.perf_counter()
    for first in range(0, len(actions) - chunk + 1, chunk):
        outcomes = pool.step_chunk(slots, actions[first : first + chunk].transpose(1, 0, 2))
        executed += sum(outcome.num_executed for outcome in outcomes)
        ended = [slot for slot in slots if outcomes[slot].terminated or outcomes[slot].truncated]
        if ended:
            pool.reset(ended, [_task(pool, slot, first + 1 if restart else 0) for slot in ended])
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


def _bench_stock(factory: LiberoFactory, image_size: int, seed: int) -> float:
    """Steps a second of hf-libero as it comes, in one process like ours."""
    actions = _random_actions(factory.spec, (STOCK_STEPS, 1), seed)
    stock = StockFactory(factory, factory.spec, (2, image_size, image_size, 3))
    with closing(WorkerPool(stock, 1, timeout_s=600)) as pool:
        return _run_chunks(pool, actions, 1, restart=False)


class StockEnv:
    """LIBERO's own environment as a `SingleEnv`, which renders both cameras in every step, as the package does."""

    def __init__(self, image_size: int, assets: str, spec: SuiteSpec) -> None:
        self._image_size, self._assets, self._spec = image_size, assets, spec
        self._env: Any = None
        self._seen: Any = None
        self._instruction = ""

    def reset(self, task: Task) -> None:
        """Start the task's episode."""
        if self._env is None:
            self._env = stock_env(task, self._image_size, self._assets)
        self._seen = restart(self._env, task)
        self._instruction = self._spec.tasks[task.task_id].instruction

    def step(self, action: FloatArray) -> StepOutcome:
        """One step, rendered."""
        self._seen, reward, done, _ = self._env.step(action)
        return StepOutcome(float(reward), bool(done), False, bool(done))

    def observe(self) -> Observation:
        """What the last step rendered."""
        images = np.stack([self._seen["agentview_image"], self._seen["robot0_eye_in_hand_image"]])
        return Observation(images, np.zeros(self._spec.proprio_dim, np.float32), self._instruction)

    def frame(self) -> UInt8Array:
        """The agent's view."""
        image: UInt8Array = self._seen["agentview_image"]
        return image

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()


@dataclass(frozen=True)
class StockFactory:
    """Makes `StockEnv`s with our own graphics settings."""

    own: LiberoFactory
    spec: SuiteSpec
    image_shape: tuple[int, int, int, int]

    def variables(self, slot: int) -> Mapping[str, str]:
        """As for our own environments."""
        return self.own.variables(slot)

    def build(self) -> StockEnv:
        """The environment."""
        return StockEnv(self.image_shape[1], str(self.own.assets), self.spec)

    def build_expert(self, env: SingleEnv) -> Expert:
        """There is none: timing needs no expert."""
        raise NotImplementedError
