from collections.abc import Callable

import numpy as np
import pytest

from vlarl.types import Observation


@pytest.fixture
def observe() -> Callable[..., Observation]:
    """An observation with random pixels and state: observe(seed, instruction)."""

    def make(seed: int, instruction: str = "pick up the red cube", size: int = 56, num_images: int = 1) -> Observation:
        rng = np.random.default_rng(seed)
        images = rng.integers(0, 256, (num_images, size, size, 3), dtype=np.uint8)
        return Observation(images, rng.uniform(-1, 1, 8).astype(np.float32), instruction)

    return make
