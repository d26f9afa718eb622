"""Demonstrations of the tabletop suites by scripted experts, perfect or flawed, as flat arrays.

Work is cut into units of one task each; a unit's seed follows from the run's seed and its place, so the result is the
same for any number of worker processes.
"""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlarl.envs.tabletop.expert import ExpertFlaws, ScriptedExpert
from vlarl.envs.tabletop.geometry import BoolArray, IndexArray
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.envs.tabletop.render import Camera
from vlarl.envs.tabletop.tasks import FIRST_FRESH_STATE, get_suite
from vlarl.types import FloatArray, IntArray, Observation, Task, UInt8Array

EPISODES_PER_UNIT = 50
FRESH_STATES = 2**40  # fresh initial states are drawn from this many
IDLE_STEPS = 4  # a demonstrator that has given up is watched this long, so that the imitator learns to stand still
GRIPPER = 6


@dataclass(frozen=True)
class DemoSet:
    """N frames of E episodes, one after the other."""

    images: UInt8Array  # [N, I, H, W, 3]
    proprio: FloatArray  # [N, 8]
    actions: FloatArray  # [N, 7] as the demonstrator intended them; what it executed was shaken by noise
    instruction_ids: IntArray  # [N] index into `instructions`
    instructions: tuple[str, ...]
    episode_starts: IntArray  # [E] first frame
    episode_lengths: IntArray  # [E]
    success: BoolArray  # [E]

    def __len__(self) -> int:
        return len(self.actions)

    def observation(self, index: int) -> Observation:
        """What the demonstrator saw at a frame."""
        instruction = self.instructions[int(self.instruction_ids[index])]
        return Observation(self.images[index], self.proprio[index], instruction)

    def chunks(self, indices: IntArray, num_actions: int) -> FloatArray:
        """[n, K, 7] the actions from each frame on; past the episode's end, stand still and keep the gripper."""
        episode = np.searchsorted(self.episode_starts, indices, side="right") - 1
        last = (self.episode_starts + self.episode_lengths - 1)[episode]
        wanted = indices[:, None] + np.arange(num_actions)
        chunk: FloatArray = self.actions[np.minimum(wanted, last[:, None])]
        chunk[..., :GRIPPER] *= (wanted <= last[:, None])[..., None]
        return chunk


@dataclass(frozen=True)
class _Unit:
    suite: str
    task_id: int
    number: int
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
) -> DemoSet:
    """Let the scripted expert play every task of the suites from fresh initial states (never the fixed ones)."""
    units = [
        _Unit(
            suite,
            task_id,
            number,
            min(EPISODES_PER_UNIT, episodes_per_task - first),
            seed,
            flaws,
            image_size,
            tuple(cameras),
        )
        for suite in suites
        for task_id in range(len(get_suite(suite).tasks))
        for number, first in enumerate(range(0, episodes_per_task, EPISODES_PER_UNIT))
    ]
    if num_workers > 1:
        # Spawned, not forked: the caller may hold threads (torch), which a fork would leave broken.
        with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
            return _join(pool.map(_play_unit, units, chunksize=1))
    return _join([_play_unit(unit) for unit in units])


def _play_unit(unit: _Unit) -> DemoSet:
    """Play the episodes of a unit side by side and cut the recording into episodes."""
    rng = np.random.default_rng([unit.seed, zlib.crc32(unit.suite.encode()), unit.task_id, unit.number])
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
    return _cut_into_episodes(record, success, pool.suite.tasks[unit.task_id].instruction)


def _cut_into_episodes(
    record: Sequence[tuple[IndexArray, UInt8Array, FloatArray, FloatArray]], success: BoolArray, instruction: str
) -> DemoSet:
    """Bring frames recorded step by step into the order of episodes."""
    lengths = np.zeros(len(success), dtype=np.int64)
    for live, *_ in record:
        lengths[live] += 1
    starts = np.cumsum(lengths) - lengths
    num_frames = int(lengths.sum())
    images = np.empty((num_frames, *record[0][1].shape[1:]), dtype=np.uint8)
    proprio = np.empty((num_frames, record[0][2].shape[1]), dtype=np.float32)
    actions = np.empty((num_frames, record[0][3].shape[1]), dtype=np.float32)
    for step, (live, seen, felt, done) in enumerate(record):
        at = starts[live] + step
        images[at], proprio[at], actions[at] = seen, felt, done
    ids = np.zeros(num_frames, dtype=np.int64)
    return DemoSet(images, proprio, actions, ids, (instruction,), starts, lengths, success)


def _join(parts: Sequence[DemoSet]) -> DemoSet:
    """One set out of many; equal instructions get one number."""
    instructions = tuple(dict.fromkeys(text for part in parts for text in part.instructions))
    lengths = np.concatenate([part.episode_lengths for part in parts])
    ids = [np.array([instructions.index(t) for t in part.instructions])[part.instruction_ids] for part in parts]
    return DemoSet(
        images=np.concatenate([part.images for part in parts]),
        proprio=np.concatenate([part.proprio for part in parts]),
        actions=np.concatenate([part.actions for part in parts]),
        instruction_ids=np.concatenate(ids),
        instructions=instructions,
        episode_starts=np.cumsum(lengths) - lengths,
        episode_lengths=lengths,
        success=np.concatenate([part.success for part in parts]),
    )
