"""The engine contract: whatever turns observations into sampled action tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from vlarl.types import ActionTokens, PolicyInput


class Engine(Protocol):
    """Generates actions with a versioned copy (or share) of the policy's weights."""

    version: int

    def generate(self, inputs: PolicyInput, temperature: float, seeds: Sequence[int]) -> ActionTokens:
        """Sample action tokens, each row from its own seed whatever else is in the batch; temperature 0 is greedy."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take over the learner's weights as `version`."""
        ...
