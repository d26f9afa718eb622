"""A user's own reward, named as `module:function`. The one place where a reward is found by an import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from vlarl.errors import UsageError
from vlarl.rewards.base import Reward, pay_at_the_end
from vlarl.types import Trajectory


class FunctionReward(Reward):
    """Calls `function(trajectory) -> float` and pays the answer on the last executed step."""

    def __init__(self, source: str) -> None:
        self.function = import_function(source)

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Pay what the user's function says the episode was worth."""
        return pay_at_the_end(trajectory, float(self.function(trajectory)))


def import_function(source: str) -> Callable[[Trajectory], float]:
    """The function behind `module:function`, or a message that says which half is wrong."""
    module_name, _, name = source.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"reward.source: cannot import the module {module_name!r} of {source!r}: {error}. "
            "Run from the folder that holds it, or put that folder on PYTHONPATH."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"reward.source: {module_name!r} has no function {name!r}; write it as `module:function`.")
    return function  # type: ignore[no-any-return]
