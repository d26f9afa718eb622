"""Evaluations made up for tests."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlarl.evaluation.record import EvalRecord, EvalSettings
from vlarl.types import EpisodeResult, EvalResult, Task

SETTINGS = EvalSettings(
    checkpoint="somewhere/final",
    fingerprint="0123456789abcdef",
    suite="tabletop_spatial",
    protocol="benchmark",
    task_ids=(0, 1),
    states_per_task=3,
    max_steps=32,
    num_trained_states=None,
    temperature=0.0,
    seed=0,
    replay_of=None,
    env={"suite": "tabletop_spatial"},
    gym={},
    policy={"actions": "tokens"},
    vlarl="0.1.0",
    machine="a machine",
    started="2025-01-01T00:00:00+00:00",
)


def episode(task_id: int, state: int, success: bool | None, length: int = 10, seed: int = 7) -> EpisodeResult:
    """An episode; None for one that crashed."""
    task = Task("tabletop_spatial", task_id, state, seed)
    return EpisodeResult(
        task,
        f"do {task_id}",
        bool(success),
        length,
        float(bool(success)),
        status="crashed" if success is None else "ok",
    )


def record(
    outcomes: Mapping[tuple[int, int], bool | None], folder: Path | None = None, planned: int = 0, **settings: Any
) -> EvalRecord:
    """{(task, state): success} as an evaluation."""
    episodes = tuple(episode(task_id, state, success) for (task_id, state), success in outcomes.items())
    count = planned or len(episodes)
    result = EvalResult(episodes, complete=count == len(episodes))
    return EvalRecord(replace(SETTINGS, **settings), count, result, folder)
