"""Reads a policy's observations from a Gymnasium environment, and maps the policy's actions to it.

Paths name the values: `render`, `pixels`, `sensors.front.rgb`, `info.success`. The same code reads one environment and
one slot of a batch.
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
POLICY_ACTIONS = 7  # action dimensions of a policy that gym.actions selects from, unless it names more
NO_PROPRIO = 8  # zeros, as many as the robot's state has dimensions in the other suites

Find = Callable[[str, str], Any]
"""(option, path) -> the value there, of one environment."""


@dataclass(frozen=True)
class EnvOutput:
    """The latest output of an environment, or of a batch of them."""

    observation: Any
    info: Mapping[str, Any]
    render: Callable[[], Any]

    def find(self, option: str, path: str) -> Any:
        """The value at a path; if there is none, the error names what is there instead."""
        if path == RENDER:
            return self._rendered(option)
        keys = path.split(".")
        tree, where = (self.info, "info") if keys[0] == "info" else (self.observation, "the observation")
        if where == "info":
            keys = keys[1:]
        elif path == WHOLE and not isinstance(tree, Mapping):
            return tree
        for key in keys:
            if not isinstance(tree, Mapping):
                remedy = f"; `{WHOLE}` is all of it" if tree is self.observation else ""
                raise missing(option, path, f"{where} is {described(tree)}, not a dict{remedy}")
            if key not in tree:
                held = ", ".join(str(each) for each in tree) or "nothing"
                raise missing(option, path, f"{where} has no {key!r}; it has {held}")
            tree, where = tree[key], f"{where}'s {key!r}"
        return tree

    def _rendered(self, option: str) -> Any:
        image = self.render()
        if image is None:
            remedy = (
                "make the environment with render_mode='rgb_array', such as by --gym.kwargs "
                "'{render_mode: rgb_array}', or name an image of the observation with --gym.images"
            )
            raise missing(option, RENDER, f"render() returned nothing; {remedy}")
        return image


def missing(option: str, path: str, message: str) -> UnreadableError:
    """The error for a path that has no value, or an unusable one."""
    return UnreadableError([Problem(f"{option} = {shown(path)}", message, (option,))])


def described(value: object) -> str:
    """A value's dtype and shape, or its type."""
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
        """Images and proprio, as copies."""
        images = [resized(to_image(find("gym.images", path), path), self._image_size) for path in self._images]
        values = [state(find("gym.proprio", path), path) for path in self._proprio]
        proprio = np.concatenate(values) if values else np.zeros(NO_PROPRIO, np.float32)
        return Observation(np.stack(images), proprio, instruction)


def to_image(value: Any, path: str) -> UInt8Array:
    """An environment's image as uint8 [H, W, 3].

    Channels may be first or last, values whole or from 0 to 1; grey gets three channels, alpha is dropped.
    """
    image = as_array(value)
    if image.ndim == 2:
        image = image[..., None]
    if image.ndim == 3 and image.shape[2] not in (1, 3, 4) and image.shape[0] in (1, 3, 4):
        image = np.moveaxis(image, 0, 2)
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or not image.size:
        raise missing("gym.images", path, f"is {described(value)}; an image is [H, W, 3] or [3, H, W]")
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
    """The image resized to a square of `size` pixels; unchanged if it is one."""
    if image.shape[:2] == (size, size):
        return image
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))


def state(value: Any, path: str) -> FloatArray:
    """The values at a path, flattened."""
    array = as_array(value)
    if array.dtype.kind not in "fiub":
        raise missing("gym.proprio", path, f"is {described(value)}; the robot's state must be numeric")
    with np.errstate(over="ignore"):  # overflow becomes infinity, which is refused
        values: FloatArray = array.astype(np.float32).ravel()
    if not np.isfinite(values).all():
        raise missing("gym.proprio", path, "the environment returned NaN or infinity; the robot's state must be finite")
    return values


class Tasks:
    """The instructions for the policy, and the reset options that choose a task."""

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
        text = find("gym.instructions", self.path)
        if not isinstance(text, str):
            raise missing("gym.instructions", self.path, f"is {described(text)}; an instruction is text")
        return text


def step_outcome(
    success_path: str, find: Find, reward: Any, terminated: Any, truncated: Any, mode: RewardMode
) -> StepOutcome:
    """A step as vlarl defines it: success ends an episode, and a terminated one is not truncated as well."""
    ended, cut = truth(terminated, "terminated"), truth(truncated, "truncated")
    subject = f"gym.success = {shown(success_path)}"
    success = ended if success_path == ENDED else truth(find("gym.success", success_path), subject)
    ended = ended or success
    return StepOutcome(float(reward) if mode == "dense" else float(success), ended, cut and not ended, success)


class ActionMap:
    """Maps the policy's actions to the environment's: selects dimensions and scales them from [-1, 1] to its bounds.

    Dimensions without bounds are passed on unchanged.
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
            message = f"names {len(actions)} dimensions, the environment takes {size}: {space}"
            raise ConfigError([Problem(f"gym.actions = {shown(tuple(actions))}", message, ("gym.actions",))])
        self._indices = np.arange(size) if actions is None else np.asarray(actions, np.intp)
        self.action_dim = size if actions is None else max(POLICY_ACTIONS, *(index + 1 for index in actions))
        low, high = space.low.astype(np.float64).ravel(), space.high.astype(np.float64).ravel()
        self._bounded = np.isfinite(low) & np.isfinite(high)
        self._low, self._high = np.where(self._bounded, low, -1.0), np.where(self._bounded, high, 1.0)

    def __call__(self, actions: FloatArray) -> NDArray[Any]:
        """[..., D] of the policy -> [..., *shape] of the environment; a fresh array."""
        if actions.shape[-1] != self.action_dim:
            raise ValueError(f"an action must have {self.action_dim} dimensions, not {actions.shape[-1]}")
        chosen = actions[..., self._indices].astype(np.float64)
        fraction = (chosen + 1.0) / 2.0
        within = (self._low + fraction * (self._high - self._low)).clip(self._low, self._high)
        scaled = np.where(self._bounded, within, chosen)
        return scaled.reshape(*actions.shape[:-1], *self._shape).astype(self._dtype)


def gym_suite(config: GymConfig, max_steps: int, action_dim: int, first: Observation) -> SuiteSpec:
    """The suite of a Gymnasium environment: its states are the seeds of its resets."""
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
