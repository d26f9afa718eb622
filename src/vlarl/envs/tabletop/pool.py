"""The tabletop world as an `EnvPool`: slots that run chunks of actions, all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlarl.envs.base import NOTHING, Actions, LockstepPool, Record, RewardMode, as_chunks, united
from vlarl.envs.tabletop.geometry import BoolArray, Float64Array, IndexArray
from vlarl.envs.tabletop.render import Camera, Renderer
from vlarl.envs.tabletop.tasks import get_suite, initial_state
from vlarl.envs.tabletop.world import TabletopWorld
from vlarl.types import ChunkOutcome, FloatArray, Observation, Task, UInt8Array

ACTION_DIM = 7


class TabletopPool(LockstepPool):
    """`num_envs` tables, each of which runs any task of the suites.

    The sparse reward is 1 at success. The dense one is the change of progress towards the goals.
    """

    def __init__(
        self,
        suites: str | Sequence[str],
        num_envs: int,
        image_size: int = 64,
        cameras: Sequence[Camera] = ("agent",),
        reward: RewardMode = "sparse",
        video_size: int = 256,
        max_steps: int | None = None,
    ) -> None:
        if tuple(cameras) not in (("agent",), ("agent", "wrist")):
            raise ValueError(f"cameras must be ('agent',) or ('agent', 'wrist'), not {tuple(cameras)}")
        if reward not in ("sparse", "dense"):
            raise ValueError(f"reward must be 'sparse' or 'dense', not {reward!r}")
        super().__init__()
        known = [get_suite(suite) for suite in ([suites] if isinstance(suites, str) else suites)]
        limited = [suite if max_steps is None else replace(suite, max_steps=max_steps) for suite in known]
        self.spec = united([suite.spec for suite in limited])
        self._limits = {suite.name: suite.max_steps for suite in limited}
        self.num_envs = num_envs
        self.world = TabletopWorld(num_envs)
        self._renderers = [Renderer(self.world, camera, image_size) for camera in cameras]
        self._video_renderer = Renderer(self.world, "agent", video_size)
        self._dense = reward == "dense"
        self._instructions = [""] * num_envs
        self._running = np.zeros(num_envs, dtype=np.bool_)
        self._num_steps = np.zeros(num_envs, dtype=np.int64)
        self._max_steps = np.zeros(num_envs, dtype=np.int64)  # of each slot's episode

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        """Start each task in its slot and return the first observations."""
        self.start(slots, tasks)
        return self.observe(np.asarray(slots, dtype=np.intp))

    def start(self, slots: Sequence[int], tasks: Sequence[Task]) -> None:
        """Reset without rendering, for callers that render by themselves."""
        for slot, task in zip(slots, tasks, strict=True):
            suite = self.spec.of(task.suite)
            self.world.reset(slot, initial_state(task.suite, task.task_id, task.init_state))
            self._instructions[slot] = suite.tasks[task.task_id].instruction
            self._max_steps[slot] = self._limits[task.suite]
            self._running[slot] = True
            self._num_steps[slot] = 0

    def step_chunk(self, slots: Sequence[int], actions: Actions, record: Record = NOTHING) -> list[ChunkOutcome]:
        """Run one chunk [len(slots), K, 7] in each slot, stopping at a slot's first end; return what `record` says."""
        rows = np.asarray(slots, dtype=np.intp)
        chunks = as_chunks(actions, len(rows), ACTION_DIM)
        rewards = np.zeros(chunks.shape[:2], dtype=np.float32)
        num_executed = np.zeros(len(rows), dtype=np.int64)
        success = np.zeros(len(rows), dtype=np.bool_)
        truncated = np.zeros(len(rows), dtype=np.bool_)
        frames: dict[int, list[UInt8Array]] = {slot: [] for slot in slots if slot in record.frames}
        passed: dict[int, list[Observation]] = {slot: [] for slot in slots if slot in record.steps}
        live = np.arange(len(rows))
        for k in range(chunks.shape[1]):
            if k and passed:
                recorded = np.array([row for row in rows[live] if row in passed], dtype=np.intp)
                for slot, observation in zip(recorded.tolist(), self.observe(recorded), strict=True):
                    passed[slot].append(observation)
            rewards[live, k], success[live], truncated[live] = self.step(rows[live], chunks[live, k])
            num_executed[live] += 1
            for slot in set(rows[live].tolist()) & record.frames:
                frames[slot].append(self.frame(slot))
            live = live[self._running[rows[live]]]
            if not len(live):
                break
        observations = self.observe(rows)
        return [
            ChunkOutcome(
                rewards=rewards[i],
                num_executed=int(num_executed[i]),
                terminated=bool(success[i]),
                truncated=bool(truncated[i]),
                success=bool(success[i]),
                observation=observations[i],
                frames=tuple(frames.get(slot, ())),
                passed=tuple(passed.get(slot, ())),
            )
            for i, slot in enumerate(slots)
        ]

    def step(self, rows: IndexArray, actions: FloatArray) -> tuple[Float64Array, BoolArray, BoolArray]:
        """One step without rendering: rewards, terminated (success) and truncated of each row [n]."""
        if not self._running[rows].all():
            idle = rows[~self._running[rows]].tolist()
            raise RuntimeError(f"slots {idle} run no episode: reset them before stepping")
        before = self.world.progress(rows) if self._dense else np.zeros(len(rows))
        self.world.step(rows, actions)
        self._num_steps[rows] += 1
        success = self.world.succeeded(rows)
        truncated = ~success & (self._num_steps[rows] >= self._max_steps[rows])
        self._running[rows] = ~(success | truncated)
        now = self.world.progress(rows) if self._dense else success.astype(np.float64)
        rewards: Float64Array = now - before
        return rewards, success, truncated

    def observe(self, rows: IndexArray) -> list[Observation]:
        """The current observation of each slot."""
        images, proprio = self.render(rows), self.world.proprio(rows)
        return [Observation(images[i], proprio[i], self._instructions[row]) for i, row in enumerate(rows)]

    def render(self, rows: IndexArray) -> UInt8Array:
        """[n, I, H, W, 3] the cameras of each slot."""
        return np.stack([renderer.render(rows) for renderer in self._renderers], axis=1)

    def frame(self, slot: int) -> UInt8Array:
        """A large image [H, W, 3] of the slot's current state, for videos."""
        image: UInt8Array = self._video_renderer.render(np.array([slot]))[0]
        return image

    def close(self) -> None:
        """Nothing to release: the pool is plain memory."""
