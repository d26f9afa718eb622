"""Demonstrations of the tabletop suites by scripted experts, perfect or flawed, as flat arrays.

Work is split into units of one task each; a unit's seed follows from the run's seed and its index, so the result is the
same for any number of worker processes.
"""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vlarl.data.demo_set import DemoSet, join
from vlarl.envs.base import Demonstration, ExpertFlaws
from vlarl.envs.tabletop.expert import ScriptedExpert
from vlarl.envs.tabletop.geometry import BoolArray, IndexArray
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.envs.tabletop.render import Camera
from vlarl.envs.tabletop.tasks import FIRST_FRESH_STATE, get_suite
from vlarl.types import FloatArray, Observation, Task, UInt8Array

EPISODES_PER_UNIT = 50
FRESH_STATES = 2**40  # fresh initial states are sampled from this many
IDLE_STEPS = 4  # recorded after a demonstrator has given up, so that the policy learns to stand still
TABLETOP = "tabletop"  # its suites have one robot and one set of statistics


@dataclass(frozen=True)
class _Unit:
    suite: str
    task_id: int
    index: int
    num_episodes: int
    seed: int
    flaws: ExpertFlaws
    image_size: int
    cameras: tuple[Camera, ...]


def generate_demos(
    suites: Sequence[str],
    episodes_per_task: int,
    seed: int,
    flaws: ExpertFlaws,
    image_size: int = 64,
    cameras: Sequence[Camera] = ("agent",),
    num_workers: int = 1,
    task_ids: Sequence[int] | None = None,
) -> DemoSet:
    """Let the scripted expert play tasks of the suites, all by default, from fresh initial states, never fixed ones."""
    units = [
        _Unit(
            suite,
            task_id,
            index,
            min(EPISODES_PER_UNIT, episodes_per_task - first),
            seed,
            flaws,
            image_size,
            tuple(cameras),
        )
        for suite in suites
        for task_id in (range(len(get_suite(suite).tasks)) if task_ids is None else task_ids)
        for index, first in enumerate(range(0, episodes_per_task, EPISODES_PER_UNIT))
    ]
    if num_workers > 1:
        # Spawned, not forked: the caller may hold threads (torch), which a fork would leave broken.
        with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
            return join(pool.map(_play_unit, units, chunksize=1))
    return join([_play_unit(unit) for unit in units])


def _play_unit(unit: _Unit) -> DemoSet:
    """Play the episodes of a unit in parallel and split the recording into episodes."""
    rng = np.random.default_rng([unit.seed, zlib.crc32(unit.suite.encode()), unit.task_id, unit.index])
    states = FIRST_FRESH_STATE + rng.integers(FRESH_STATES, size=unit.num_episodes)
    seeds = rng.integers(2**63, size=unit.num_episodes)
    pool = TabletopPool(unit.suite, unit.num_episodes, unit.image_size, unit.cameras)
    tasks = [
        Task(unit.suite, unit.task_id, int(state), int(episode_seed))
        for state, episode_seed in zip(states, seeds, strict=True)
    ]
    pool.start(range(unit.num_episodes), tasks)
    expert = ScriptedExpert(pool.world, unit.flaws)
    for slot, task in enumerate(tasks):
        expert.reset(slot, task.seed)
    success = np.zeros(unit.num_episodes, dtype=np.bool_)
    idle = np.zeros(unit.num_episodes, dtype=np.int64)
    live = np.arange(unit.num_episodes)
    record: list[tuple[IndexArray, UInt8Array, FloatArray, FloatArray]] = []  # live episodes of each step
    while len(live):
        images, proprio, actions = pool.render(live), pool.world.proprio(live), expert.act(live)
        record.append((live, images, proprio, actions))
        _, success[live], truncated = pool.step(live, expert.shake(live, actions))
        idle[live] += expert.finished[live]
        live = live[~(success[live] | truncated | (idle[live] > IDLE_STEPS))]
    return _split_into_episodes(record, success, pool.spec.tasks[unit.task_id].instruction)


def _split_into_episodes(
    record: Sequence[tuple[IndexArray, UInt8Array, FloatArray, FloatArray]], success: BoolArray, instruction: str
) -> DemoSet:
    """Reorder frames that were recorded step by step by episode."""
    lengths = np.zeros(len(success), dtype=np.int64)
    for live, *_ in record:
        lengths[live] += 1
    starts = np.cumsum(lengths) - lengths
    num_frames = int(lengths.sum())
    images = np.empty((num_frames, *record[0][1].shape[1:]), dtype=np.uint8)
    proprio = np.empty((num_frames, record[0][2].shape[1]), dtype=np.float32)
    actions = np.empty((num_frames, record[0][3].shape[1]), dtype=np.float32)
    for step, (live, views, state, done) in enumerate(record):
        at = starts[live] + step
        images[at], proprio[at], actions[at] = views, state, done
    ids = np.zeros(num_frames, dtype=np.int64)
    return DemoSet(TABLETOP, images, proprio, actions, ids, (instruction,), lengths, success)


class TabletopExperts:
    """The tabletop's experts, one episode at a time: for recording."""

    def __init__(self, suite: str, image_size: int, cameras: Sequence[Camera]) -> None:
        self._pool = TabletopPool(suite, 1, image_size, cameras)
        self.spec = self._pool.spec

    def demonstrate(self, tasks: Sequence[Task], flaws: ExpertFlaws) -> Iterator[Demonstration]:
        """The episodes in the order of the tasks."""
        expert = ScriptedExpert(self._pool.world, flaws)
        return (self._play(expert, task) for task in tasks)

    def _play(self, expert: ScriptedExpert, task: Task) -> Demonstration:
        row = np.zeros(1, np.intp)
        self._pool.start([0], [task])
        expert.reset(0, task.seed)
        seen: list[Observation] = []
        actions: list[FloatArray] = []
        rewards: list[float] = []
        ended = success = False
        idle = 0
        while not ended and idle < IDLE_STEPS:
            seen += self._pool.observe(row)
            actions.append(expert.act(row)[0])
            reward, won, truncated = self._pool.step(row, expert.shake(row, actions[-1][None]))
            rewards.append(float(reward[0]))
            success, ended = bool(won[0]), bool(won[0] or truncated[0])
            idle += int(expert.finished[0])
        return Demonstration.of_steps(task, seen, actions, rewards, success)
