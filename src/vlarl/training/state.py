"""The counters of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainerState:
    """What a run needs beside weights and moments to go on as if it had never stopped."""

    iteration: int = 0
    env_steps: int = 0
    episodes: int = 0
    optimizer_steps: int = 0
    ema_return: float | None = None
    best_ema_return: float | None = None
    best_iteration: int | None = None
    sampler: dict[str, Any] = field(default_factory=dict)  # what the task sampler goes on from
