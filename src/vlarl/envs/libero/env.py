"""LIBERO as a `SingleEnv`. All conversions between LIBERO's conventions and those of checkpoints are here."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlarl.envs.base import StepOutcome, SuiteSpec
from vlarl.envs.libero.assets import how_to_get, prepare
from vlarl.envs.libero.models import SceneReader
from vlarl.envs.libero.physics import Float64Array, Physics
from vlarl.envs.libero.render import Renderer
from vlarl.envs.libero.suites import initial_states, problem_file
from vlarl.errors import UsageError
from vlarl.types import FloatArray, Observation, Task, TaskKey, UInt8Array

CAMERAS = {"agent": "agentview", "wrist": "robot0_eye_in_hand"}
VIDEO_SIZE = 256
NUM_SETTLE_STEPS = 10
SETTLE_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # stand still, gripper open, while objects come to rest


class LiberoEnv:
    """One LIBERO simulator, rebuilt when the task changes; it renders on demand only.

    Episodes of one task and initial state begin alike, whatever their seed. Actions are in the policy's convention:
    hand motion in [-1, 1], gripper 1 to open and 0 to close.
    """

    def __init__(
        self,
        spec: SuiteSpec,
        assets: Path,
        cameras: Sequence[Literal["agent", "wrist"]],
        image_size: int,
        exact_pixels: bool,
    ) -> None:
        prepare(assets)
        self._spec = spec
        self._assets = assets
        self._cameras = tuple(CAMERAS[camera] for camera in cameras)
        self._image_size = image_size
        self._renderer = Renderer(max(image_size, VIDEO_SIZE), exact_pixels)
        self._physics: Physics | None = None
        self._scenes = SceneReader()
        self._loaded: TaskKey | None = None
        self._instruction = ""

    @property
    def simulator(self) -> Any:
        """LIBERO's own environment of the running task, for experts that read the simulator's state."""
        return self._running().simulator

    def reset(self, task: Task) -> None:
        """Start the task's episode and let objects come to rest."""
        suite = self._spec.of(task.suite)
        num_tasks, num_states = len(suite.tasks), len(suite.benchmark_states)
        if not (0 <= task.task_id < num_tasks and 0 <= task.init_state < num_states):
            raise ValueError(
                f"{task.suite} has {num_tasks} tasks of {num_states} initial states, and no {task.episode_id}"
            )
        physics = self._load(task.suite, task.task_id)
        self._instruction = suite.tasks[task.task_id].instruction
        physics.reset(furniture_seed(task), self._states[task.init_state])
        for _ in range(NUM_SETTLE_STEPS):
            physics.step(SETTLE_ACTION)

    def step(self, action: FloatArray) -> StepOutcome:
        """Apply one action [7] of the policy, without rendering."""
        success = self._running().step(simulator_action(action))
        return StepOutcome(reward=float(success), terminated=success, truncated=False, success=success)

    def observe(self) -> Observation:
        """The current images and proprio; renders the policy's cameras."""
        images = np.stack([self._render(camera, self._image_size) for camera in self._cameras])
        return Observation(images, proprio(*self._running().proprio()), self._instruction)

    def frame(self) -> UInt8Array:
        """An image [H, W, 3] for videos, from the agent's camera."""
        return self._render(CAMERAS["agent"], VIDEO_SIZE)

    def close(self) -> None:
        """Release the simulator and the OpenGL context."""
        self._physics = None
        self._scenes = SceneReader()
        self._renderer.close()

    def _render(self, camera: str, size: int) -> UInt8Array:
        physics = self._running()
        return upright(self._renderer.render(physics.model, physics.seen(), camera, size))

    def _running(self) -> Physics:
        if self._physics is None:
            raise RuntimeError("no episode runs: reset the environment first")
        return self._physics

    def _load(self, suite: str, task_id: int) -> Physics:
        if self._physics is None or self._loaded != (suite, task_id):
            self._physics = None
            gc.collect()  # LIBERO's objects have reference cycles
            try:
                self._physics = Physics(problem_file(suite, task_id), self._scenes)
            except FileNotFoundError as error:
                missing = f"LIBERO's assets are incomplete: there is no {error.filename}, which task {task_id} needs."
                raise UsageError(f"{missing} {how_to_get(self._assets)}") from error
            self._states = initial_states(suite, task_id)
            self._loaded = (suite, task_id)
        return self._physics


def furniture_seed(task: Task) -> int:
    """Seed of what an initial state does not contain; the same for all episodes of a group."""
    return 1000 * task.task_id + task.init_state


def simulator_action(action: FloatArray) -> Float64Array:
    """A policy's action [7] as LIBERO reads it: the gripper's 1 (open) and 0 (closed) become -1 and 1."""
    if action.shape != (7,) or not np.isfinite(action).all():
        raise ValueError(f"an action is 7 finite values, not {action!r}")
    converted = action.astype(np.float64)
    converted[6] = -np.sign(2 * converted[6] - 1)
    return converted


def upright(pixels: UInt8Array) -> UInt8Array:
    """An OpenGL image rotated by 180 degrees, as in the training data of LIBERO checkpoints."""
    return np.ascontiguousarray(pixels[::-1, ::-1])


def proprio(position: Float64Array, quaternion: Float64Array, fingers: Float64Array) -> FloatArray:
    """[8] hand position 3, its orientation (a quaternion wxyz) as axis-angle 3, fingers 2."""
    w = float(np.clip(quaternion[0], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    rotation = np.zeros(3) if np.isclose(sine, 0.0) else quaternion[1:] * (2.0 * np.arccos(w) / sine)
    state: FloatArray = np.concatenate([position, rotation, fingers]).astype(np.float32)
    return state
