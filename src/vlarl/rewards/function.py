"""A user's own reward, given in Python or named as `module:function`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import SupportsFloat

from vlarl.config.reward_module import import_function
from vlarl.deadline import DeadlineError, TimedCaller
from vlarl.errors import VlarlError, describe_error, excerpt
from vlarl.rewards.base import Reward, RewardTimeoutError, reward_at_end
from vlarl.types import Trajectory

TIMEOUT_S = 300.0  # where reward.timeout_s is null: the first call may have a model to load


class FunctionReward(Reward):
    """Calls `function(trajectory) -> float` and assigns the result to the last executed step.

    The function is called in a thread of its own, so that it can be abandoned when it does not return.
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
        """Assign the value that the user's function returns for the episode."""
        try:
            reward = self._caller.call(lambda: self.function(trajectory), self.timeout_s)
        except DeadlineError as error:
            limit = f"reward.timeout_s = {self.timeout_s:g} s"
            raise RewardTimeoutError(f"reward.source: {self.source} has not returned within {limit}.") from error
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's code: sys.exit, or an exception that does not derive from Exception
            raise VlarlError(
                f"reward.source: {self.source} {describe_error(error)}; it must return a finite number."
            ) from error
        if not isinstance(reward, SupportsFloat) or not math.isfinite(reward):
            returned = excerpt(repr(reward), 200)
            raise VlarlError(f"reward.source: {self.source} returned {returned}; it must return a finite number.")
        return reward_at_end(trajectory, float(reward))
