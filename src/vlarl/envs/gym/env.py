"""Any Gymnasium environment as a suite: `env.suite: gym`, with its paths in section `gym`."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import environ
from pathlib import Path
from typing import NoReturn

from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.envs.base import Expert, RewardMode, SingleEnv, StepOutcome, SuiteSpec
from vlarl.envs.guardian import run_watched
from vlarl.envs.gym.reading import RENDER, ActionMap, EnvOutput, Reader, Tasks, step_outcome, to_image
from vlarl.envs.gym.source import GymnasiumEnv, make_env, refused
from vlarl.envs.mujoco import render_backend, render_variables
from vlarl.envs.process_log import last_lines
from vlarl.errors import UsageError
from vlarl.types import FloatArray, Observation, Task, UInt8Array

LOG_TAIL_LINES = 12


class GymEnv:
    """One Gymnasium environment as a `SingleEnv`.

    A task's initial state is the seed of `reset`. Success ends an episode, whether the environment stops there or not.
    """

    def __init__(self, env: GymnasiumEnv, config: GymConfig, image_size: int, reward: RewardMode) -> None:
        self._env = env
        self._reader = Reader(config, image_size)
        self._tasks = Tasks(config)
        self._actions = ActionMap(env.action_space, config.actions)
        self._success, self._reward = config.success, reward
        self._video_path = RENDER if env.render_mode == "rgb_array" else config.images[0]
        self._seen: EnvOutput | None = None
        self._instruction = ""

    def reset(self, task: Task) -> None:
        """Start the task's episode."""
        observation, info = self._env.reset(seed=task.init_state, options=self._tasks.options(task.task_id))
        self._seen = EnvOutput(observation, info, self._env.render)
        self._instruction = self._tasks.instruction(task.task_id, self._seen.find)

    def step(self, action: FloatArray) -> StepOutcome:
        """Apply one action [D] of the policy."""
        observation, reward, terminated, truncated, info = self._env.step(self._actions(action))
        self._seen = EnvOutput(observation, info, self._env.render)
        return step_outcome(self._success, self._seen.find, reward, terminated, truncated, self._reward)

    def observe(self) -> Observation:
        """The current images and proprio."""
        return self._reader.read(self._now().find, self._instruction)

    def frame(self) -> UInt8Array:
        """An image [H, W, 3] in the environment's own size: what it renders, or the policy's first view."""
        return to_image(self._now().find("gym.images", self._video_path), self._video_path).copy()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _now(self) -> EnvOutput:
        if self._seen is None:
            raise RuntimeError("nothing to see: reset the environment first")
        return self._seen


@dataclass(frozen=True)
class GymFactory:
    """Makes `GymEnv`s of one configuration, each in its own process."""

    spec: SuiteSpec
    image_shape: tuple[int, int, int, int]
    config: GymConfig
    max_steps: int | None
    reward: RewardMode
    environment: Mapping[str, str] = field(default_factory=dict)

    def variables(self, slot: int) -> Mapping[str, str]:
        """Environment variables of the process."""
        return self.environment

    def build(self) -> GymEnv:
        """The environment."""
        return GymEnv(make_env(self.config, self.max_steps), self.config, self.image_shape[1], self.reward)

    def build_expert(self, env: SingleEnv) -> Expert:
        """There is none: UsageError."""
        return _no_expert()


def gym_factory(config: GymConfig, env: EnvConfig, image_size: int, reward: RewardMode) -> GymFactory:
    """The factory of the configured environment, which is built once to get its shapes and refuse what can't work."""
    variables = render_variables(render_backend(env.render), env.render_gpu, pyopengl=False)
    return GymFactory(
        spec=gym_spec(config, env.max_steps, variables, env.timeout_s),
        image_shape=(len(config.images), image_size, image_size, 3),
        config=config,
        max_steps=env.max_steps,
        reward=reward,
        environment=variables,
    )


def gym_spec(
    config: GymConfig, max_steps: int | None, variables: Mapping[str, str] | None = None, timeout_s: float = 180.0
) -> SuiteSpec:
    """The suite of the configured environment, which a process of its own builds, inspects and discards.

    Simulators hold GPUs and graphics contexts, read settings at import, and may crash: a separate process keeps all of
    that out of the trainer.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # Pickled by itself, to be loaded once sys.path is set: its factory may be in a user's module.
        request = pickle.dumps((config, max_steps))
        (folder / "request").write_bytes(pickle.dumps((request, sys.path)))
        with (folder / "log").open("wb") as log:
            try:
                command = [sys.executable, "-m", "vlarl.envs.gym.probe", temporary]
                code = run_watched(command, log, {**environ, **(variables or {})}, timeout_s)
            except subprocess.TimeoutExpired as error:
                message = f"was not ready within env.timeout_s = {timeout_s:g} s; raise that if it is only slow"
                raise refused(config, message) from error
        if not (folder / "result").exists():
            with (folder / "log").open("rb") as log:
                wrote = "".join(f"\n    {line}" for line in last_lines(log, LOG_TAIL_LINES))
            raise refused(config, f"its process ended with exit code {code} while it was tried out{wrote}")
        result: SuiteSpec | str = pickle.loads((folder / "result").read_bytes())
    if isinstance(result, str):
        raise UsageError(result)
    return result


def _no_expert() -> NoReturn:
    raise UsageError("env.suite = 'gym': it has no scripted expert; demonstrations have to come from an RLDS folder")
