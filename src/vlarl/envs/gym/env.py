"""Any Gymnasium environment as a suite: `env.suite: gym`, and section `gym` says where everything is found."""

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
from vlarl.envs.gym.reading import RENDER, ActionMap, Reader, Seen, Tasks, judged, picture
from vlarl.envs.gym.source import GymnasiumEnv, make_env, refused
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
        self._record = RENDER if env.render_mode == "rgb_array" else config.images[0]
        self._seen: Seen | None = None
        self._instruction = ""

    def reset(self, task: Task) -> None:
        """Start the task's episode."""
        observation, info = self._env.reset(seed=task.init_state, options=self._tasks.options(task.task_id))
        self._seen = Seen(observation, info, self._env.render)
        self._instruction = self._tasks.instruction(task.task_id, self._seen.find)

    def step(self, action: FloatArray) -> StepOutcome:
        """Apply one action [D] of the policy."""
        observation, reward, terminated, truncated, info = self._env.step(self._actions(action))
        self._seen = Seen(observation, info, self._env.render)
        return judged(self._success, self._seen.find, reward, terminated, truncated, self._reward)

    def observe(self) -> Observation:
        """What the robot sees and feels now."""
        return self._reader.read(self._now().find, self._instruction)

    def frame(self) -> UInt8Array:
        """A picture [H, W, 3] in the environment's own size: what it renders, or the policy's first view."""
        return picture(self._now().find("gym.images", self._record), self._record).copy()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _now(self) -> Seen:
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
        """What the process is started with."""
        return self.environment

    def build(self) -> GymEnv:
        """The environment."""
        return GymEnv(make_env(self.config, self.max_steps), self.config, self.image_shape[1], self.reward)

    def build_expert(self, env: SingleEnv) -> Expert:
        """There is none: UsageError."""
        return _no_expert()


def gym_factory(config: GymConfig, env: EnvConfig, image_size: int, reward: RewardMode) -> GymFactory:
    """What makes the configured environment. It is built once to learn its shapes and to refuse what can't work."""
    variables = render_variables(env)
    return GymFactory(
        spec=gym_spec(config, env.max_steps, variables, env.timeout_s),
        image_shape=(len(config.images), image_size, image_size, 3),
        config=config,
        max_steps=env.max_steps,
        reward=reward,
        environment=variables,
    )


def render_variables(env: EnvConfig) -> dict[str, str]:
    """How MuJoCo draws, if it is MuJoCo; and one thread for each process, as there are as many processes as cores."""
    backend = environ.get("MUJOCO_GL", "egl") if env.render == "auto" else env.render
    variables = {"MUJOCO_GL": backend, "OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}
    return variables if env.render_gpu is None else {**variables, "MUJOCO_EGL_DEVICE_ID": str(env.render_gpu)}


def gym_spec(
    config: GymConfig, max_steps: int | None, variables: Mapping[str, str] | None = None, timeout_s: float = 180.0
) -> SuiteSpec:
    """The suite of the configured environment, which a process of its own makes, looks at and throws away.

    In a process of its own, because simulators hold on to GPUs and graphics contexts, read their settings at import,
    and may crash: none of that is the trainer's.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        asked = pickle.dumps(
            (config, max_steps)
        )  # read once the path is set: its factory may be of a user's own module
        (folder / "request").write_bytes(pickle.dumps((asked, sys.path)))
        with (folder / "log").open("wb") as log:
            try:
                command = [sys.executable, "-m", "vlarl.envs.gym.probe", place]
                code = run_watched(command, log, {**environ, **(variables or {})}, timeout_s)
            except subprocess.TimeoutExpired as error:
                message = f"was not ready within env.timeout_s = {timeout_s:g} s; raise that if it only is slow"
                raise refused(config, message) from error
        if not (folder / "answer").exists():
            with (folder / "log").open("rb") as log:
                wrote = "".join(f"\n    {line}" for line in last_lines(log, LOG_TAIL_LINES))
            raise refused(config, f"its process ended with exit code {code} while it was tried out{wrote}")
        answer: SuiteSpec | str = pickle.loads((folder / "answer").read_bytes())
    if isinstance(answer, str):
        raise UsageError(answer)
    return answer


def _no_expert() -> NoReturn:
    raise UsageError("env.suite = 'gym': it brings no scripted expert; demonstrations have to come from an RLDS folder")
