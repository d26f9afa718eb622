"""The tabletop suites as Gymnasium environments, single and vectorised, and their registration.

import vlarl.envs.tabletop
env = gymnasium.make("vlarl/TabletopSpatial-v0")
envs = gymnasium.make_vec("vlarl/TabletopSpatial-v0", num_envs=16)
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vlarl.envs.base import RewardMode
from vlarl.envs.tabletop.pool import ACTION_DIM, TabletopPool
from vlarl.envs.tabletop.render import Camera
from vlarl.types import FloatArray, Task, UInt8Array

IMAGE_KEYS: dict[Camera, str] = {"agent": "image", "wrist": "wrist_image"}
MAX_INSTRUCTION = 128
GYM_IDS: dict[str, str] = {
    "vlarl/TabletopSpatial-v0": "tabletop_spatial",
    "vlarl/TabletopObject-v0": "tabletop_object",
    "vlarl/TabletopGoal-v0": "tabletop_goal",
    "vlarl/TabletopLong-v0": "tabletop_long",
}

Obs = dict[str, Any]  # an element of a Gymnasium Dict space


class TabletopVectorEnv(VectorEnv[Obs, FloatArray, np.ndarray[Any, Any]]):
    """A suite as a Gymnasium vector environment; ended environments are reset at the next step."""

    metadata: dict[str, Any] = {
        "render_modes": ["rgb_array"],
        "render_fps": 10,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        suite: str,
        num_envs: int = 1,
        image_size: int = 64,
        cameras: Sequence[Camera] = ("agent",),
        reward: RewardMode = "sparse",
        render_mode: str | None = None,
    ) -> None:
        self.pool = TabletopPool(suite, num_envs, image_size, cameras, reward)
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.single_observation_space = _observation_space(image_size, cameras)
        self.single_action_space = spaces.Box(-1.0, 1.0, (ACTION_DIM,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._cameras = tuple(cameras)
        self._ended = np.zeros(num_envs, dtype=np.bool_)
        self._tasks: list[Task] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        """Start all environments; `options` may fix `task_id` and `init_state` (one value, or one for each)."""
        super().reset(seed=seed, options=options)
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        self._tasks = [self._sample_task(slot, options or {}) for slot in range(self.num_envs)]
        self.pool.start(range(self.num_envs), self._tasks)
        self._ended[:] = False
        return self._observe(), self._info(np.zeros(self.num_envs, dtype=np.bool_))

    def step(
        self, actions: FloatArray
    ) -> tuple[Obs, np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], dict[str, Any]]:
        """Step all environments; those that ended at the last step are reset instead, and their action is ignored."""
        rewards = np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, dtype=np.bool_)
        truncated = np.zeros(self.num_envs, dtype=np.bool_)
        live, ended = np.flatnonzero(~self._ended), np.flatnonzero(self._ended).tolist()
        for slot in ended:
            self._tasks[slot] = self._sample_task(slot, {})
        self.pool.start(ended, [self._tasks[slot] for slot in ended])
        if len(live):
            chosen = np.asarray(actions, dtype=np.float32)[live]
            rewards[live], terminated[live], truncated[live] = self.pool.step(live, chosen)
        self._ended = terminated | truncated
        return self._observe(), rewards, terminated, truncated, self._info(terminated)

    def render(self) -> tuple[UInt8Array, ...] | None:
        """A large image of every environment, in render mode `rgb_array`."""
        if self.render_mode != "rgb_array":
            return None
        return tuple(self.pool.frame(slot) for slot in range(self.num_envs))

    def _sample_task(self, slot: int, options: dict[str, Any]) -> Task:
        spec = self.pool.spec
        task_id = int(self.np_random.integers(len(spec.tasks)))
        state = int(self.np_random.choice(spec.train_states))
        seed = int(self.np_random.integers(2**63))
        fixed_task, fixed_state = options.get("task_id", task_id), options.get("init_state", state)
        return Task(spec.name, _pick(fixed_task, slot), _pick(fixed_state, slot), seed)

    def _observe(self) -> Obs:
        rows = np.arange(self.num_envs)
        images = self.pool.render(rows)
        observation: Obs = {IMAGE_KEYS[camera]: images[:, i] for i, camera in enumerate(self._cameras)}
        observation["proprio"] = self.pool.world.proprio(rows)
        observation["instruction"] = tuple(self.pool.spec.tasks[task.task_id].instruction for task in self._tasks)
        return observation

    def _info(self, success: np.ndarray[Any, Any]) -> dict[str, Any]:
        return {
            "success": success.copy(),
            "task_id": np.array([task.task_id for task in self._tasks]),
            "init_state": np.array([task.init_state for task in self._tasks]),
        }


class TabletopEnv(gym.Env[Obs, FloatArray]):
    """A suite as a single Gymnasium environment: a vector environment of one."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        suite: str,
        image_size: int = 64,
        cameras: Sequence[Camera] = ("agent",),
        reward: RewardMode = "sparse",
        render_mode: str | None = None,
    ) -> None:
        self._envs = TabletopVectorEnv(suite, 1, image_size, cameras, reward, render_mode)
        self.render_mode = render_mode
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        """Start an episode; `options` may fix `task_id` and `init_state`."""
        super().reset(seed=seed)
        episode_seed = int(self.np_random.integers(2**31))
        observation, info = self._envs.reset(seed=episode_seed, options=options)
        return _first(observation), _first(info)

    def step(self, action: FloatArray) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        """One step."""
        observation, reward, terminated, truncated, info = self._envs.step(np.asarray(action)[None])
        return _first(observation), float(reward[0]), bool(terminated[0]), bool(truncated[0]), _first(info)

    def render(self) -> UInt8Array | None:
        """A large image, in render mode `rgb_array`."""
        frames = self._envs.render()
        return None if frames is None else frames[0]


def register_tabletop() -> None:
    """Make the suites known to `gymnasium.make` and `gymnasium.make_vec`."""
    for gym_id, suite in GYM_IDS.items():
        if gym_id not in gym.registry:
            gym.register(
                gym_id,
                entry_point=f"{__name__}:{TabletopEnv.__name__}",
                vector_entry_point=f"{__name__}:{TabletopVectorEnv.__name__}",
                kwargs={"suite": suite},
            )


def _observation_space(image_size: int, cameras: Sequence[Camera]) -> spaces.Dict:
    image = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
    entries: dict[str, spaces.Space[Any]] = {IMAGE_KEYS[camera]: image for camera in cameras}
    entries["proprio"] = spaces.Box(-1.0, 1.0, (8,), np.float32)
    entries["instruction"] = spaces.Text(MAX_INSTRUCTION, charset=string.ascii_lowercase + " ")
    return spaces.Dict(entries)


def _pick(value: Any, slot: int) -> int:
    return int(value[slot]) if isinstance(value, Sequence | np.ndarray) else int(value)


def _first(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value[0] for key, value in batch.items()}
