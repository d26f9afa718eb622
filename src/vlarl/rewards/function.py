"""A user's own reward, given in Python or named as `module:function`: the one place where a reward is imported."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import SupportsFloat

from vlarl.config.problems import nearest
from vlarl.deadline import DeadlineError, TimedCaller
from vlarl.errors import UsageError, VlarlError, excerpt, raised_in, told
from vlarl.rewards.base import Reward, RewardTimeoutError, pay_at_the_end
from vlarl.types import Trajectory

LISTED = 10  # functions that a message names
TIMEOUT_S = 300.0  # where reward.timeout_s is null: the first call may have a model to load


class FunctionReward(Reward):
    """Calls `function(trajectory) -> float` and pays the answer on the last executed step.

    The function is called in a thread of its own, so that it can be given up when it does not return.
    """

    def __init__(
        self, source: str, function: Callable[[Trajectory], float] | None = None, timeout_s: float | None = None
    ) -> None:
        """`source` names the function in messages, and is imported where the function itself is not given."""
        self.source = source
        self.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self.function = import_function(source) if function is None else function
        self._caller = TimedCaller(f"reward {source}")

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Pay what the user's function says the episode was worth."""
        try:
            reward = self._caller.call(lambda: self.function(trajectory), self.timeout_s)
        except DeadlineError as error:
            limit = f"reward.timeout_s = {self.timeout_s:g} s"
            raise RewardTimeoutError(f"reward.source: {self.source} has not returned within {limit}.") from error
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's code: sys.exit, or an exception of theirs that is no Exception
            raise VlarlError(f"reward.source: {self.source} {told(error)}; it must return a finite number.") from error
        if not isinstance(reward, SupportsFloat) or not math.isfinite(reward):
            returned = excerpt(repr(reward), 200)
            raise VlarlError(f"reward.source: {self.source} returned {returned}; it must return a finite number.")
        return pay_at_the_end(trajectory, float(reward))


def import_function(source: str) -> Callable[[Trajectory], float]:
    """The function behind `module:function`, or a message that says which half is wrong."""
    module_name, _, name = source.partition(":")
    if os.getcwd() not in sys.path:  # the `vlarl` program starts without the folder it is called from
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module: whatever it does is told to them
        raise UsageError(
            f"reward.source: cannot import the module {module_name!r} of {source!r}: {_why(error, module_name)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"reward.source: {module_name!r} has no function {name!r}; {_there(module, name)}.")
    return function  # type: ignore[no-any-return]


def _there(module: ModuleType, name: str) -> str:
    """The functions that a module has of its own, for one that was asked for and is not there."""
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    own = [key for key in own if getattr(getattr(module, key), "__module__", None) == module.__name__]
    if not own:
        return "it defines none; write `def NAME(trajectory): ...` in it"
    match = nearest(name, own)
    return (f"did you mean {module.__name__}:{match}? " if match else "") + f"It has {', '.join(own[:LISTED])}"


def _why(error: BaseException, module: str) -> str:
    """What went wrong while a module was imported, and what helps."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"{error}. Run from the folder that holds it, or put that folder on PYTHONPATH."
    if isinstance(error, ModuleNotFoundError):
        return f"it needs the package {error.name!r}, which is not installed in this environment; install it."
    if isinstance(error, SyntaxError):
        place = f"{Path(error.filename or module).name}, line {error.lineno}"
        return f"{type(error).__name__} in {place}: {error.msg}; correct it."
    frames = [frame for frame in raised_in(error) if "importlib" not in frame.filename]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    if isinstance(error, SystemExit):
        return f'it {told(error)}{place}; put what is a program under `if __name__ == "__main__":`.'
    return f"it {told(error)}{place}; correct it, or move what fails into the function."
