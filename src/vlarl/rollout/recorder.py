"""What happened in every episode: one line each in episodes.jsonl, and films of a few."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from vlarl.errors import VlarlError
from vlarl.observability.files import disk_errors
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.video import write_video
from vlarl.types import EpisodeResult, Task, Trajectory, UInt8Array

Phase = Literal["rollout", "eval"]


class EpisodeRecorder:
    """Writes the episodes of a run into its directory."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._path = run_dir.episodes_file
        self._videos = run_dir.videos
        with disk_errors(self._path):
            self._file = self._path.open("a", buffering=1, encoding="utf-8")

    def record(
        self, iteration: int, phase: Phase, episodes: Iterable[Trajectory | EpisodeResult], policy_version: int = 0
    ) -> None:
        """Append one line an episode; `policy_version` is used for results, which don't carry their own."""
        for episode in episodes:
            row = {"iteration": iteration, "phase": phase, **_row(episode, policy_version)}
            with disk_errors(self._path):
                self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def video_path(self, iteration: int, task: Task, success: bool) -> Path:
        """Where the film of an episode goes."""
        outcome = "success" if success else "failure"
        return self._videos / f"iter_{iteration:04d}_task{task.task_id:02d}_state{task.init_state:02d}_{outcome}.mp4"

    def film(
        self, path: Path, frames: Sequence[UInt8Array], instruction: str, outcome: bool, fps: int = 10
    ) -> Path | None:
        """Write a film; a machine that can't encode one gets a warning, since training is worth more than its film."""
        try:
            write_video(path, frames, instruction, outcome, fps)
        except VlarlError as error:
            logging.getLogger(__name__).warning("%s", error)
            return None
        return path

    def film_episodes(self, iteration: int, episodes: Iterable[EpisodeResult], fps: int = 10) -> list[Path]:
        """Write a film of every episode that carries frames."""
        films = (
            self.film(self.video_path(iteration, e.task, e.success), e.frames, e.instruction, e.success, fps)
            for e in episodes
            if e.frames
        )
        return [path for path in films if path is not None]

    def close(self) -> None:
        """Close the file."""
        with disk_errors(self._path):
            self._file.close()

    def __enter__(self) -> EpisodeRecorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _row(episode: Trajectory | EpisodeResult, policy_version: int) -> dict[str, Any]:
    if isinstance(episode, Trajectory):
        instruction, episode_return = episode.final_observation.instruction, episode.env_return
        status, policy_version = episode.status, episode.policy_version
    else:
        instruction, episode_return, status = episode.instruction, episode.episode_return, "ok"
    task = episode.task
    return {
        "episode_id": task.episode_id,
        "suite": task.suite,
        "task_id": task.task_id,
        "init_state": task.init_state,
        "seed": task.seed,
        "group": task.group,
        "member": task.member,
        "instruction": instruction,
        "success": bool(episode.success),
        "length": int(episode.length),
        "return": float(episode_return) if math.isfinite(episode_return) else None,
        "status": status,
        "policy_version": policy_version,
    }
