"""Episodes as rows of JSON, in episodes.jsonl and results.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vlarl.types import EpisodeResult, Task

STATUSES = ("ok", "crashed", "reward_failed")
_OLD_NUM_RETRIES = "redone"  # the key in files of older versions


def episode_row(episode: EpisodeResult) -> dict[str, Any]:
    """The row of an episode: enough to count it, and to run it again."""
    task, response = episode.task, episode.response
    return {
        "episode_id": task.episode_id,
        "suite": task.suite,
        "task_id": task.task_id,
        "init_state": task.init_state,
        "seed": task.seed,
        "instruction": episode.instruction,
        "success": bool(episode.success),
        "length": int(episode.length),
        "return": float(episode.episode_return) if math.isfinite(episode.episode_return) else None,
        "status": episode.status,
        "num_retries": episode.num_retries,
        **({} if response is None else {"response_length": response.num_tokens, "truncated": response.cut_off}),
    }


def read_episode(row: Mapping[str, Any]) -> EpisodeResult:
    """The episode of a row; KeyError, TypeError or ValueError for a row that is not one."""
    if not isinstance(row["success"], bool) or row["status"] not in STATUSES:
        raise ValueError(f"success is {row['success']!r} and status is {row['status']!r} in an episode")
    return EpisodeResult(
        task=Task(str(row["suite"]), int(row["task_id"]), int(row["init_state"]), int(row["seed"])),
        instruction=str(row["instruction"]),
        success=bool(row["success"]),
        length=int(row["length"]),
        episode_return=math.nan if row["return"] is None else float(row["return"]),
        status=row["status"],
        num_retries=int(row["num_retries"] if "num_retries" in row else row[_OLD_NUM_RETRIES]),
    )
