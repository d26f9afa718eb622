"""A batched environment that shows 256 px images and costs nothing else, for benchmarks/driver.py."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

SIZE = 256


class Images(VectorEnv):
    """Each slot shows noise of its own, a different part of it at each step; the reward is that of a coin."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, num_envs: int, size: int = SIZE) -> None:
        self.num_envs = num_envs
        self.single_action_space = spaces.Box(-np.ones(7, np.float32), np.ones(7, np.float32))
        self.size = size
        self._noise = np.random.default_rng(0).integers(0, 256, (2 * size, size, 3), dtype=np.uint8)
        self._offsets = np.zeros(num_envs, np.int64)
        self._random = [np.random.default_rng(0) for _ in range(num_envs)]

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the episodes of the chosen slots."""
        for slot in np.flatnonzero(options["reset_mask"]):
            self._random[slot] = np.random.default_rng(seed[slot])
            self._offsets[slot] = self._random[slot].integers(self.size)
        return self._seen(), {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Show the next part of the noise."""
        self._offsets = (self._offsets + 1) % self.size
        rewards = np.array([own.random() for own in self._random])
        never = np.zeros(self.num_envs, bool)
        return self._seen(), rewards, never, never, {"success": never}

    def _seen(self) -> dict[str, NDArray[np.uint8]]:
        return {"pixels": np.stack([self._noise[offset : offset + self.size] for offset in self._offsets])}
