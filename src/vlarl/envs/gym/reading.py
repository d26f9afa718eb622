"""Reads what a policy needs out of a Gymnasium environment, and gives it the policy's actions.

Paths say where things are: `render`, `pixels`, `sensors.front.rgb`, `info.success`. The same code reads one environment
and one slot of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vlarl.config.problems import ConfigError, Problem, shown
from vlarl.config.schema import GymConfig
from vlarl.config.suites import num_gym_eval_states
from vlarl.envs.base import RewardMode, StepOutcome, SuiteSpec, TaskSpec
from vlarl.envs.signals import UnreadableError, as_array, truth
from vlarl.types import FloatArray, Observation, UInt8Array

RENDER = "render"
WHOLE = "observation"
ENDED = "terminated"
POLICY_ACTIONS = 7  # what a policy gives whose numbers have to be chosen from, unless gym.actions names more
NO_PROPRIO = 8  # zeros, as many as the robot's state of the other suites has numbers

Find = Callable[[str, str], Any]
"""(option, path) -> the value there, of one environment."""


@dataclass(frozen=True)
class Seen:
    """What an environment, or a batch of them, showed last."""

    observation: Any
    info: Mapping[str, Any]
    render: Callable[[], Any]

    def find(self, option: str, path: str) -> Any:
        """The value at a path; a message that names what is there instead if there is none."""
        if path == RENDER:
            return self._drawn(option)
        keys = path.split(".")
        tree, place = (self.info, "info") if keys[0] == "info" else (self.observation, "the observation")
        if place == "info":
            keys = keys[1:]
        elif path == WHOLE and not isinstance(tree, Mapping):
            return tree
        for key in keys:
            if not isinstance(tree, Mapping):
                remedy = f"; `{WHOLE}` is all of it" if tree is self.observation else ""
                raise missing(option, path, f"{place} is {described(tree)}, not a dict{remedy}")
            if key not in tree:
                held = ", ".join(str(each) for each in tree) or "nothing"
                raise missing(option, path, f"{place} has no {key!r}; it has {held}")
            tree, place = tree[key], f"{place}'s {key!r}"
        return tree

    def _drawn(self, option: str) -> Any:
        picture = self.render()
        if picture is None:
            remedy = (
                "make the environment with render_mode='rgb_array', such as by --gym.kwargs "
                "'{render_mode: rgb_array}', or name an image of the observation with --gym.images"
            )
            raise missing(option, RENDER, f"render() gave nothing; {remedy}")
        return picture


def missing(option: str, path: str, message: str) -> UnreadableError:
    """The error for a path that leads nowhere, or to something of no use."""
    return UnreadableError([Problem(f"{option} = {shown(path)}", message, (option,))])


def described(value: object) -> str:
    """A value's kind in a few words."""
    array = as_array(value)
    return f"{array.dtype}{list(array.shape)}" if array.dtype != object else type(value).__name__


class Reader:
    """Makes observations by the paths of section `gym`."""

    def __init__(self, config: GymConfig, image_size: int) -> None:
        self._images, self._proprio = config.images, config.proprio
        self._image_size = image_size

    @property
    def image_shape(self) -> tuple[int, int, int, int]:
        """(I, H, W, 3) of what it reads."""
        return len(self._images), self._image_size, self._image_size, 3

    @property
    def paths(self) -> list[tuple[str, str]]:
        """Everything that is read, as (option, path)."""
        return [("gym.images", path) for path in self._images] + [("gym.proprio", path) for path in self._proprio]

    def read(self, find: Find, instruction: str) -> Observation:
        """What the robot sees and feels; the arrays are copies."""
        pictures = [resized(picture(find("gym.images", path), path), self._image_size) for path in self._images]
        numbers = [state(find("gym.proprio", path), path) for path in self._proprio]
        proprio = np.concatenate(numbers) if numbers else np.zeros(NO_PROPRIO, np.float32)
        return Observation(np.stack(pictures), proprio, instruction)


def picture(value: Any, path: str) -> UInt8Array:
    """[H, W, 3] uint8 of what an environment calls a picture.

    Channels may be first or last, values whole or from 0 to 1; grey gets three channels, transparency is dropped.
    """
    image = as_array(value)
    if image.ndim == 2:
        image = image[..., None]
    if image.ndim == 3 and image.shape[2] not in (1, 3, 4) and image.shape[0] in (1, 3, 4):
        image = np.moveaxis(image, 0, 2)
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or not image.size:
        raise missing("gym.images", path, f"is {described(value)}; a picture is [H, W, 3] or [3, H, W]")
    image = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image[..., :3]
    if image.dtype == np.uint8:
        return image
    full = 1 if image.dtype.kind == "f" else 255
    low, high = float(image.min()), float(image.max())
    if image.dtype.kind not in "fiu" or not (low >= -1e-6 and high <= full + 1e-6):  # NaN is neither
        allowed = "fractions go from 0 to 1, whole numbers from 0 to 255"
        raise missing("gym.images", path, f"is {image.dtype} from {low:g} to {high:g}; {allowed}: convert it")
    pixels: UInt8Array = np.rint(image * (255 // full)).clip(0, 255).astype(np.uint8)
    return pixels


def resized(image: UInt8Array, size: int) -> UInt8Array:
    """The picture as a square of `size` pixels; itself if it is one."""
    if image.shape[:2] == (size, size):
        return image
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))


def state(value: Any, path: str) -> FloatArray:
    """The numbers at a path, in a row."""
    array = as_array(value)
    if array.dtype.kind not in "fiub":
        raise missing("gym.proprio", path, f"is {described(value)}; the robot's state is made of numbers")
    with np.errstate(over="ignore"):  # what float32 can't hold is infinity, and refused
        numbers: FloatArray = array.astype(np.float32).ravel()
    if not np.isfinite(numbers).all():
        raise missing("gym.proprio", path, "the environment returned NaN or infinity; the robot's state must be finite")
    return numbers


class Tasks:
    """What a policy is told, and how an environment is told which task and initial state to start."""

    def __init__(self, config: GymConfig) -> None:
        given = config.instructions
        self.path = given[0] if len(given) == 1 and given[0].startswith("info.") else None
        self.sentences = given if given and self.path is None else ("",)
        self._option = config.task_option

    def options(self, task_id: int) -> dict[str, Any]:
        """Options of `reset` that choose the task."""
        return {} if self._option is None else {self._option: task_id}

    def instruction(self, task_id: int, find: Find) -> str:
        """The sentence for a task that has just been started."""
        if self.path is None:
            return self.sentences[task_id]
        told = find("gym.instructions", self.path)
        if not isinstance(told, str):
            raise missing("gym.instructions", self.path, f"is {described(told)}; an instruction is text")
        return told


def judged(
    success_path: str, find: Find, reward: Any, terminated: Any, truncated: Any, mode: RewardMode
) -> StepOutcome:
    """A step in vlarl's words: success ends an episode, and what has ended is not truncated as well."""
    ended, cut = truth(terminated, "terminated"), truth(truncated, "truncated")
    subject = f"gym.success = {shown(success_path)}"
    success = ended if success_path == ENDED else truth(find("gym.success", success_path), subject)
    ended = ended or success
    return StepOutcome(float(reward) if mode == "dense" else float(success), ended, cut and not ended, success)


class ActionMap:
    """From the policy's actions to the environment's: which number goes where, stretched from [-1, 1] to its range.

    Where the environment has no bounds, numbers are passed on as they are.
    """

    def __init__(self, space: gymnasium.Space[Any], actions: Sequence[int] | None) -> None:
        if not isinstance(space, gymnasium.spaces.Box) or space.dtype is None or space.dtype.kind != "f":
            remedy = (
                "policies give continuous actions: wrap the environment so that its action space is a Box, in a "
                "function of yours, and name that: --gym.env my_module:make"
            )
            raise ConfigError([Problem("gym.env", f"its action space is {space}; {remedy}", ("gym.env",))])
        self._shape, self._dtype = space.shape, space.dtype
        size = int(np.prod(space.shape))
        if actions is not None and len(actions) != size:
            message = f"names {len(actions)} numbers, the environment takes {size}: {space}"
            raise ConfigError([Problem(f"gym.actions = {shown(tuple(actions))}", message, ("gym.actions",))])
        self._places = np.arange(size) if actions is None else np.asarray(actions, np.intp)
        self.action_dim = size if actions is None else max(POLICY_ACTIONS, *(place + 1 for place in actions))
        low, high = space.low.astype(np.float64).ravel(), space.high.astype(np.float64).ravel()
        self._bounded = np.isfinite(low) & np.isfinite(high)
        self._low, self._high = np.where(self._bounded, low, -1.0), np.where(self._bounded, high, 1.0)

    def __call__(self, actions: FloatArray) -> NDArray[Any]:
        """[..., D] of the policy -> [..., *shape] of the environment; a fresh array."""
        if actions.shape[-1] != self.action_dim:
            raise ValueError(f"an action must have {self.action_dim} numbers, not {actions.shape[-1]}")
        chosen = actions[..., self._places].astype(np.float64)
        share = (chosen + 1.0) / 2.0
        within = (self._low + share * (self._high - self._low)).clip(self._low, self._high)
        stretched = np.where(self._bounded, within, chosen)
        return stretched.reshape(*actions.shape[:-1], *self._shape).astype(self._dtype)


def gym_suite(config: GymConfig, max_steps: int, action_dim: int, first: Observation) -> SuiteSpec:
    """The suite that a Gymnasium environment makes: its states are the seeds of its resets."""
    num_train = config.num_states - num_gym_eval_states(config)
    states = tuple(range(config.num_states))
    sentences = [first.instruction] if Tasks(config).path else list(Tasks(config).sentences)
    return SuiteSpec(
        name="gym",
        tasks=tuple(TaskSpec(task_id, sentence, max_steps) for task_id, sentence in enumerate(sentences)),
        train_states=states[:num_train],
        eval_states=states[num_train:],
        benchmark_states=states[num_train:],
        action_dim=action_dim,
        proprio_dim=len(first.proprio),
    )
