"""The counters of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainerState:
    """What a run needs beside weights and optimizer state to resume as if it had never stopped.

    Its dicts are replaced, never changed in place: a checkpoint may still refer to an earlier state than the loop's.
    """

    iteration: int = 0
    env_steps: int = 0
    episodes: int = 0
    optimizer_steps: int = 0
    ema_return: float | None = None  # mean over tasks of the average returns below
    best_ema_return: float | None = None  # the same when the policy was last kept
    best_iteration: int | None = None
    sampler: dict[str, Any] = field(default_factory=dict)  # the state that the task sampler resumes from
    return_sums: dict[str, float] = field(default_factory=dict)  # by task: sum of weight x return (best_return.py)
    return_weights: dict[str, float] = field(default_factory=dict)  # by task: sum of the same weights
    best_returns: dict[str, float] = field(default_factory=dict)  # by task: the average that a better policy must beat
    unfinished: dict[str, float] = field(default_factory=dict)  # of an updated iteration: its row, not yet written
    rollout_steps: int = 0  # environment steps of the newest iteration
    open_episodes: dict[str, Any] = field(default_factory=dict)  # of segments.py, or outstanding.py
