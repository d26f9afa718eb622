"""Finds and makes the Gymnasium environment that a configuration names: a registered id, or `module:factory`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from vlarl.config.callables import find_given, is_given
from vlarl.config.problems import ConfigError, Problem, nearest, shown
from vlarl.config.schema import GymConfig
from vlarl.envs.mujoco import log_warnings
from vlarl.errors import describe_error, raised_in

GymnasiumEnv = gymnasium.Env[Any, Any]
GymnasiumVectorEnv = VectorEnv[Any, Any, Any]

RESET_OPTIONS = ("reset_mask", "env_idx")
"""The reset option that selects slots of a batched environment: Gymnasium's mask, or ManiSkill's indices."""


def make_env(config: GymConfig, max_steps: int | None) -> GymnasiumEnv:
    """One environment. `max_steps` replaces the time limit of a registered id."""
    factory = find_factory(config)
    if factory is not None:
        log_warnings()
        made = factory(**config.kwargs)
        log_warnings()  # its simulator may have been loaded just now
        if not isinstance(made, gymnasium.Env):
            raise refused(config, f"returned {_kind(made)}, not a gymnasium.Env; with gym.batched it may be a vector")
        return made
    arguments: dict[str, Any] = {"render_mode": "rgb_array", "max_episode_steps": max_steps, **config.kwargs}
    try:
        # Gymnasium's own checker warns in every process; `vlarl env check` says more, once.
        registered: GymnasiumEnv = gymnasium.make(str(config.env), disable_env_checker=True, **arguments)
    except (gymnasium.error.Error, ImportError) as error:
        remedy = "`module:factory` names an environment of yours"
        raise refused(config, f"Gymnasium can't make it: {str(error).rstrip('.')}; {remedy}") from error
    log_warnings()
    return registered


def make_vector_env(config: GymConfig, num_envs: int) -> GymnasiumVectorEnv:
    """A batch of `num_envs` environments that never resets a slot by itself."""
    factory = find_factory(config)
    if factory is None:
        raise refused(config, "gym.batched needs module:factory, a function that takes num_envs and returns the vector")
    log_warnings()
    made = factory(num_envs=num_envs, **config.kwargs)
    log_warnings()
    if not isinstance(made, VectorEnv):
        raise refused(
            config, f"returned {_kind(made)}, not a gymnasium.vector.VectorEnv; leave out gym.batched for one"
        )
    if made.num_envs != num_envs:
        raise refused(config, f"made {made.num_envs} environments instead of {num_envs}")
    mode = made.metadata.get("autoreset_mode")
    if mode not in (AutoresetMode.DISABLED, AutoresetMode.DISABLED.value):
        remedy = "make it with autoreset_mode=AutoresetMode.DISABLED, and say so in metadata['autoreset_mode']"
        raise refused(config, f"its autoreset mode is {shown(getattr(mode, 'value', mode))}; {remedy}")
    if reset_option(made) not in RESET_OPTIONS:
        known = " or ".join(RESET_OPTIONS)
        raise refused(config, f"metadata['reset_option'] is {shown(reset_option(made))}; it must be {known}")
    return made


def reset_option(env: GymnasiumVectorEnv) -> str:
    """Which of `RESET_OPTIONS` a batched environment understands, by its metadata."""
    return str(env.metadata.get("reset_option", RESET_OPTIONS[0]))


def find_factory(config: GymConfig) -> Callable[..., Any] | None:
    """The callable given in Python, or named by `module:factory`; None for an id, which Gymnasium resolves
    (`module:Name-v0` is one too)."""
    source = str(config.env)
    if is_given(source):
        return find_given("gym.env", source, config.given, "env")
    module_name, colon, name = source.partition(":")
    if os.getcwd() not in sys.path:  # the `vlarl` program starts without the working directory
        sys.path.append(os.getcwd())
    if not colon or not all(part.isidentifier() for part in name.split(".")):
        return None
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        remedy = "run from the folder that holds it, or put that folder on PYTHONPATH"
        raise refused(config, f"can't import the module {module_name!r}: {error}; {remedy}") from error
    try:
        found = reduce(getattr, name.split("."), module)
    except AttributeError as error:
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        match = nearest(name, known)
        hint = f"did you mean {match!r}?" if match else f"it has {', '.join(known) or 'no function'}"
        raise refused(config, f"there is no {name!r} in {module_name!r}; {hint}") from error
    if not callable(found):
        raise refused(config, f"{name!r} is {_kind(found)}; it must be a class or function that makes an environment")
    return found


def refused(config: GymConfig, message: str) -> ConfigError:
    """The error for an environment that can't be used."""
    return ConfigError([Problem(f"gym.env = {shown(config.env)}", message, ("gym.env",))])


def raised(config: GymConfig, doing: str, error: BaseException) -> ConfigError:
    """The error for a user's environment that raised an exception or called sys.exit, with the line."""
    frames = raised_in(error)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return refused(config, f"{doing} {describe_error(error)}{where}")


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
