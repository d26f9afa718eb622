"""Meta-World as a `SingleEnv`, with all conversions of its conventions.

policy's action [7]   x, y, z in [-1, 1], a centimetre; rotation, ignored;  gripper  1 open ... 0 closed
Meta-World's [4]      x, y, z                                               effort  -1 open ... 1 closed
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vlarl.config.metaworld_tasks import METAWORLD_TASKS
from vlarl.config.schema import Camera
from vlarl.envs.base import RewardMode, StepOutcome, SuiteSpec
from vlarl.envs.metaworld.render import Canvas, ModelRenderer
from vlarl.envs.metaworld.simulator import Simulator, State
from vlarl.envs.metaworld.views import view_of
from vlarl.types import FloatArray, Observation, Task, UInt8Array

FRAME_SIZE = 256
"""Pixels of a video frame."""

MAX_SIMULATORS = 10
"""Models kept at once, the ten of MT10; each takes about 70 MB, and half a second to load."""

MAX_REWARD = 10.0
"""The maximum of Meta-World's shaped rewards."""


class MetaWorldEnv:
    """One environment, which can run any task of its suites."""

    def __init__(
        self,
        spec: SuiteSpec,
        cameras: tuple[Camera, ...],
        image_size: int,
        reward: RewardMode,
        exact_pixels: bool = False,
    ) -> None:
        self._spec = spec
        self._cameras = cameras
        self._image_size = image_size
        self._reward = reward
        self._exact_pixels = exact_pixels
        self._canvas = Canvas(max(image_size, FRAME_SIZE), exact_pixels)
        self._simulators: dict[str, Simulator] = {}  # by name, the one used last at the end
        self._renderers: dict[str, ModelRenderer] = {}
        self._name = ""
        self._instruction = ""
        self._state: State = np.zeros(0)

    @property
    def env_name(self) -> str:
        """Meta-World's name of the running task."""
        return self._name

    @property
    def state(self) -> State:
        """Meta-World's own observation, with positions and the goal: for experts, never for a policy."""
        return self._state

    def reset(self, task: Task) -> None:
        """Start the task's episode, which its initial state determines."""
        self._name = METAWORLD_TASKS[task.suite][task.task_id]
        self._instruction = self._spec.of(task.suite).tasks[task.task_id].instruction
        self._state = self._load(self._name).start(task.init_state)

    def step(self, action: FloatArray) -> StepOutcome:
        """Apply one action [7], without rendering."""
        result = self._simulators[self._name].step(to_metaworld(action))
        self._state = result.state
        reward = result.reward / MAX_REWARD if self._reward == "dense" else float(result.success)
        return StepOutcome(reward, terminated=result.success, truncated=False, success=result.success)

    def observe(self) -> Observation:
        """The current images and proprio; renders the policy's cameras."""
        simulator = self._simulators[self._name]
        rotation = np.zeros(3)  # the hand never turns
        return Observation(
            images=np.stack([self._render(camera, self._image_size) for camera in self._cameras]),
            proprio=np.concatenate([simulator.hand, rotation, simulator.fingers]).astype(np.float32),
            instruction=self._instruction,
        )

    def frame(self) -> UInt8Array:
        """The agent's current view, for videos."""
        return self._render("agent", FRAME_SIZE)

    def close(self) -> None:
        """Release everything."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()
        self._simulators.clear()
        self._canvas.close()

    def _load(self, name: str) -> Simulator:
        simulator = self._simulators.pop(name, None) or Simulator(name)
        self._simulators[name] = simulator
        if len(self._simulators) > MAX_SIMULATORS:
            oldest = next(iter(self._simulators))
            del self._simulators[oldest]
            if oldest in self._renderers:
                self._renderers.pop(oldest).close()
        return simulator

    def _render(self, camera: Camera, size: int) -> UInt8Array:
        simulator = self._simulators[self._name]
        if self._name not in self._renderers:
            self._renderers[self._name] = ModelRenderer(self._canvas, simulator.model)
        view = view_of(self._name, camera, self._exact_pixels)
        return self._renderers[self._name].render(simulator.data, view, size)


def to_metaworld(action: FloatArray) -> NDArray[np.float64]:
    """A policy's action [7] as Meta-World's [4], within its bounds."""
    effort = 1.0 - 2.0 * float(action[6])
    return np.clip(np.array([*action[:3], effort], np.float64), -1.0, 1.0)


def from_metaworld(action: NDArray[np.float64]) -> FloatArray:
    """Meta-World's action [4] as the equivalent policy action [7]."""
    x, y, z, effort = np.clip(action, -1.0, 1.0)
    return np.array([x, y, z, 0.0, 0.0, 0.0, (1.0 - effort) / 2.0], np.float32)
