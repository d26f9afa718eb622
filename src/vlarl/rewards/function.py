"""A user's own reward, given in Python or named as `module:function`: the one place where a reward is imported."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import SupportsFloat

from vlarl.errors import UsageError, VlarlError
from vlarl.rewards.base import Reward, pay_at_the_end
from vlarl.types import Trajectory


class FunctionReward(Reward):
    """Calls `function(trajectory) -> float` and pays the answer on the last executed step."""

    def __init__(self, source: str, function: Callable[[Trajectory], float] | None = None) -> None:
        """`source` names the function in messages, and is imported where the function itself is not given."""
        self.source = source
        self.function = import_function(source) if function is None else function

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Pay what the user's function says the episode was worth."""
        reward = self.function(trajectory)
        if not isinstance(reward, SupportsFloat) or not math.isfinite(reward):
            raise VlarlError(f"reward.source: {self.source} returned {reward!r}; it must return a finite number.")
        return pay_at_the_end(trajectory, float(reward))


def import_function(source: str) -> Callable[[Trajectory], float]:
    """The function behind `module:function`, or a message that says which half is wrong."""
    module_name, _, name = source.partition(":")
    if os.getcwd() not in sys.path:  # the `vlarl` program starts without the folder it is called from
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise UsageError(
            f"reward.source: cannot import the module {module_name!r} of {source!r}: {error}. "
            "Run from the folder that holds it, or put that folder on PYTHONPATH."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"reward.source: {module_name!r} has no function {name!r}; write it as `module:function`.")
    return function  # type: ignore[no-any-return]
