"""Gymnasium environments to be wrapped: a correct one, and one for each possible fault."""

import os
import sys
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import error, spaces

SIZE = 20
LOW, HIGH = np.array([-0.1, -0.2], np.float32), np.array([0.3, 0.2], np.float32)
REACHED = 0.05


def scene_image(position: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """[SIZE, SIZE, 3] a red goal and a white robot on a floor that is dark at the top and light at the bottom."""
    image = np.repeat(np.linspace(20, 120, SIZE, dtype=np.uint8)[:, None, None], SIZE, 1).repeat(3, 2).copy()
    for point, colour in ((goal, (255, 0, 0)), (position, (255, 255, 255))):
        column, row = np.clip(np.asarray(point) * SIZE, 0, SIZE - 2).astype(int)
        image[row : row + 2, column : column + 2] = colour
    return image


class Reach(gymnasium.Env):
    """A robot at a random position of the unit square reaches a goal: task 0 in the right half, task 1 in the left."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}

    def __init__(self, fault: str = "", render_mode: str | None = "rgb_array") -> None:
        self.fault, self.render_mode = fault, render_mode
        self.action_space = spaces.Box(LOW, HIGH)
        self.observation_space = spaces.Dict()
        self.buffer = np.zeros((SIZE, SIZE, 3), np.uint8)
        self.waste: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        rng = np.random.default_rng() if self.fault == "ignores the seed" else self.np_random
        if self.fault == "one state":
            rng = np.random.default_rng(0)
        left = (options or {}).get("task", 0)
        self.position = rng.uniform(0.0, 1.0, 2)
        self.goal = rng.uniform(0.0, 0.4, 2) + (0.0 if left else 0.5)
        self.num_steps = 0
        self.shake = getattr(self, "shake", 0.0) if self.fault == "remembers" else 0.0
        if self.fault == "leaks":
            self.waste.append(np.ones(8_000_000, np.uint8))
        return self._seen(), {"instruction": "go to the left goal" if left else "go to the right goal"}

    def step(self, action: np.ndarray):
        assert self.action_space.contains(action), f"{action} is outside of {self.action_space}"
        self.num_steps += 1
        self.last_action = action.copy()
        noise = {"random steps": np.random.default_rng().normal(0, 0.05, 2), "remembers": self.shake}
        self.position = np.clip(self.position + action + noise.get(self.fault, 0.0), 0.0, 1.0)
        self.shake += 0.01
        if self.fault == "raises" and self.num_steps == 3:
            raise ZeroDivisionError("the gear is broken")
        distance = float(np.abs(self.position - self.goal).max())
        reached = distance < REACHED
        reward = float("nan") if self.fault == "nan reward" else -distance
        info = {} if self.fault == "no success" else {"success": reached}
        return self._seen(), reward, reached, self.fault == "own limit" and self.num_steps == 5, info

    def _seen(self) -> dict[str, Any]:
        position = np.full(2, np.nan) if self.fault == "nan state" else self.position
        return {"pixels": {"front": self._image()}, "state": position.astype(np.float32), "goal": self.goal}

    def _image(self) -> np.ndarray:
        image = scene_image(self.position, self.goal)
        if self.fault == "one colour":
            image[:] = 90
        if self.fault == "nearly black":
            image = (image > 60).astype(np.uint8)
        if self.fault == "overwrites":
            self.buffer[:] = image
            return self.buffer
        return image

    def render(self) -> np.ndarray | None:
        return (
            None if self.fault == "renders nothing" else scene_image(self.position, self.goal).repeat(4, 0).repeat(4, 1)
        )


class Shown(gymnasium.Env):
    """Shows one given observation for ever, and remembers the actions it was given."""

    def __init__(self, observation: Any, space: spaces.Space | None = None) -> None:
        self.observation, self.actions = observation, []
        self.action_space = space or spaces.Box(-1.0, 1.0, (2,))
        self.observation_space = spaces.Dict()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.seed, self.options = seed, options
        return self.observation, {"deep": {"success": 0.0}}

    def step(self, action):
        self.actions.append(action)
        return self.observation, 0.0, False, False, {"deep": {"success": float(len(self.actions) == 3)}}


not_callable = 7


def fails() -> None:
    raise RuntimeError("no robot at this address")


def returns_nothing(**kwargs: Any) -> None:
    return None


def dies() -> None:
    os._exit(9)


def hangs() -> None:
    time.sleep(60)


def exits() -> None:
    sys.exit("no licence")


def discrete() -> Reach:
    env = Reach()
    env.action_space = spaces.Discrete(4)
    return env


def renders_with_a_missing_package() -> Reach:
    env = Reach()

    def render():
        raise error.DependencyNotInstalled("pygame is not installed, run `pip install pygame`")

    env.render = render  # type: ignore[method-assign]
    return env


def raises_in_reset() -> Reach:
    env = Reach()
    env.reset = lambda seed, options: {}["task"]  # type: ignore[method-assign]
    return env


def raises_in_step() -> Reach:
    env = Reach()
    env.step = lambda action: {}["motor"]  # type: ignore[method-assign]
    return env
