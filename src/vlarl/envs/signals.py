"""Checks of rewards, truth values and proprio where they enter from an environment: a value that is neither true nor
false is refused, and no NaN reaches the policy, where it would look like one of the policy's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.config.problems import ConfigError, Problem
from vlarl.types import Observation

SHOWN_VALUE = 60  # characters of a value in a message


class UnreadableError(ConfigError):
    """An environment returns something other than the configuration says. When the environment is tried out, the run is
    refused; during a run the episode is run again."""


class SignalError(Exception):
    """An environment returned an unusable value during an episode, which is run again."""


def truth(value: Any, subject: str) -> bool:
    """A truth value: a bool, 0 or 1, or an array of one of them. `subject` names the value in the message."""
    array = as_array(value)
    if array.size == 1 and array.dtype.kind in "biuf" and array.item() in (0, 1):
        return bool(array.item())
    message = f"the environment returned {shown_value(value)}; it must be True, False, 0 or 1"
    raise UnreadableError([Problem(subject, message)])


def as_array(value: Any) -> NDArray[Any]:
    """Anything array-like as NumPy; only here are tensors copied from their device."""
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except ValueError:  # lists of different lengths in a list
        whole = np.empty((), object)
        whole[()] = value
        return whole


def shown_value(value: Any) -> str:
    """A value for a message: an array of several values as its dtype and shape, long text cut."""
    array = as_array(value)
    if array.size != 1 and array.dtype != object:
        return f"{array.dtype}{list(array.shape)}"
    text = " ".join(repr(array.item() if array.dtype.kind in "biuf" else value).split())
    return text if len(text) <= SHOWN_VALUE else f"{text[: SHOWN_VALUE - 1]}…"


def check_reward(reward: float) -> None:
    """Refuse a reward that is not finite, also in float32, the dtype of stored rewards."""
    if not math.isfinite(reward) or abs(reward) > np.finfo(np.float32).max:
        raise SignalError(f"the environment returned {_named(reward)} as reward")


def check_observation(observation: Observation) -> None:
    """Refuse a robot's state that is not finite."""
    finite = np.isfinite(observation.proprio)
    if not finite.all():
        dimension = int(np.argmin(finite))
        value = _named(float(observation.proprio[dimension]))
        raise SignalError(f"the environment returned {value} in dimension {dimension} of the robot's state")


def _named(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinity" if math.isinf(value) else f"{value:g}"
