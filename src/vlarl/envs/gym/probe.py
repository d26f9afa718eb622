"""Tries out a Gymnasium environment: `python -m vlarl.envs.gym.probe FOLDER`, run by `gym_spec`.

    gym_spec ── FOLDER/request ──► this process ──► the environment: made, reset, stepped once, closed
             ◄── FOLDER/result ───  its SuiteSpec, or the text of everything that is wrong

gym_spec waits for the process to end.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
import numpy as np

from vlarl.config.problems import ConfigError, Problem
from vlarl.config.schema import GymConfig
from vlarl.deadline import TimedCaller
from vlarl.envs.base import SuiteSpec
from vlarl.envs.gym.reading import ActionMap, EnvOutput, Find, Reader, Tasks, gym_suite, state, step_outcome, to_image
from vlarl.envs.gym.source import make_env, raised
from vlarl.errors import UsageError
from vlarl.types import FloatArray

Result = TypeVar("Result")
CLOSE_S = 5.0


def probe(env: gymnasium.Env[Any, Any], config: GymConfig, max_steps: int | None) -> SuiteSpec:
    """Try everything that a run needs of an environment, and describe it as a suite."""
    observation, info = call_env(config, "reset", lambda: env.reset(seed=0, options=Tasks(config).options(0)))

    def step(action: FloatArray) -> Find:
        observation, _, _, _, info = env.step(action)
        return EnvOutput(observation, info, env.render).find

    limit = max_steps or (env.spec.max_episode_steps if env.spec is not None else None)
    return try_out(config, env.action_space, limit, EnvOutput(observation, info, env.render).find, step)


def try_out(
    config: GymConfig,
    space: gymnasium.Space[Any],
    limit: int | None,
    find: Find,
    step: Callable[[FloatArray], Find],
) -> SuiteSpec:
    """The suite of an environment that was just reset, or a ConfigError with all its problems.

    `step` applies an action and returns how to find values in the result.
    """
    problems: list[Problem] = []

    def attempt(action: Callable[[], Result]) -> Result | None:
        try:
            return action()
        except ConfigError as error:
            problems.extend(error.problems)
            return None

    for path in config.images:
        attempt(lambda path=path: call_env(config, "render", lambda: to_image(find("gym.images", path), path)))  # type: ignore[misc]
    for path in config.proprio:
        attempt(lambda path=path: state(find("gym.proprio", path), path))  # type: ignore[misc]
    instruction = attempt(lambda: Tasks(config).instruction(0, find))
    first = None if problems else Reader(config, image_size=1).read(find, instruction or "")
    actions = attempt(lambda: ActionMap(space, config.actions))
    if actions is not None:
        idle = actions(np.zeros(actions.action_dim, np.float32))
        found = call_env(config, "step", lambda: step(idle))
        attempt(lambda: step_outcome(config.success, found, 0.0, False, False, "sparse"))
    if limit is None:
        problems.append(Problem("env.max_steps = null", "the environment has no time limit of its own; set one"))
    if problems or first is None or actions is None or limit is None:
        raise ConfigError(problems)
    return gym_suite(config, limit, actions.action_dim, first)


def call_env(config: GymConfig, doing: str, action: Callable[[], Result]) -> Result:
    """Call the user's environment; whatever it raises becomes a message for the user."""
    try:
        return action()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # the boundary to user code
        raise raised(config, doing, error) from error


def load_request(request: bytes) -> tuple[GymConfig, int | None]:
    """Unpickle a request, whose environment may be a callable given in Python."""
    try:
        config, max_steps = pickle.loads(request)
    except Exception as error:  # noqa: BLE001 - importing the user's module raises anything
        raise UsageError(
            f"the environment that was given in Python cannot be made in another process ({type(error).__name__}: "
            f"{error}). Each environment runs in a process of its own: define the function in a module that can be "
            'imported there, and put what the script runs under `if __name__ == "__main__":`.'
        ) from error
    return config, max_steps


def main() -> None:
    """Read the request, try the environment out, write the result; then close it, which must not delay a run."""
    folder = Path(sys.argv[1])
    request, search_path = pickle.loads((folder / "request").read_bytes())
    sys.path.extend(path for path in search_path if path not in sys.path)
    result: SuiteSpec | str
    env = None
    try:
        config, max_steps = load_request(request)
        env = call_env(config, "making it", lambda: make_env(config, max_steps))
        result = probe(env, config, max_steps)
    except UsageError as error:
        result = str(error)
    (folder / "result").write_bytes(pickle.dumps(result))
    if env is not None:
        with suppress(Exception, SystemExit):  # user code: the workers of a run report it
            TimedCaller("close").call(env.close, CLOSE_S)
    os._exit(0)  # despite threads that the environment left running


if __name__ == "__main__":
    main()
