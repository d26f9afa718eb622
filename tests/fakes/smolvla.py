"""The tiny SmolVLA of tests/golden, and observations that it reads."""

from pathlib import Path
from typing import Any

import numpy as np

from vlarl.policies.family import FlowOptions
from vlarl.policies.load import load_policy
from vlarl.policies.smolvla.policy import SmolVLAPolicy
from vlarl.types import Observation

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "smolvla-tiny"
TEXTS = ("open the drawer", "put the zigzag bowl on the plate", "pick up the red cube")


def smolvla(
    folder: Path = FOLDER, *, dtype: Any = "float32", chunk_length: int | None = 3, **flow: Any
) -> SmolVLAPolicy:
    """By default three actions of a chunk of eight are executed."""
    policy = load_policy(folder, dtype=dtype, chunk_length=chunk_length, flow=FlowOptions(**flow))
    assert isinstance(policy, SmolVLAPolicy)
    return policy


def seen(seed: int, text: str | None = None) -> Observation:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (2, 24, 24, 3), dtype=np.uint8)
    return Observation(images, rng.uniform(-1, 1, 8).astype(np.float32), text or TEXTS[seed % 3])
