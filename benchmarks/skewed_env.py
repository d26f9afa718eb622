"""An environment whose episodes are short or ten times as long, depending on the state, and that mostly sleeps.

For benchmarks/streaming.py, and for the test of a real asynchronous run with slow and fast episodes.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

SIZE = 16
SLOW_STATES = 4  # one of so many


class Skewed(gymnasium.Env[dict[str, NDArray[np.uint8]], NDArray[np.float32]]):
    """Shows noise; an episode succeeds if its actions add up to more than nothing."""

    def __init__(self, short: int = 8, long: int = 80, sleep_s: float = 0.1) -> None:
        self.lengths = {False: short, True: long}
        self.sleep_s = sleep_s
        self.action_space = spaces.Box(-np.ones(7, np.float32), np.ones(7, np.float32))
        self.observation_space = spaces.Dict()
        self._noise = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        self._left, self._sum = 0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode whose length follows from the state, which is the seed."""
        super().reset(seed=seed)
        self._left, self._sum = self.lengths[(seed or 0) % SLOW_STATES == 0], 0.0
        return {"pixels": self._noise}, {}

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleep, as a simulator would work."""
        time.sleep(self.sleep_s)
        self._left -= 1
        self._sum += float(action[0])
        won = self._left == 0 and self._sum > 0
        return {"pixels": self._noise}, float(won), False, self._left == 0, {"success": won}
