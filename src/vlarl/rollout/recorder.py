"""A record of every episode: one line each in episodes.jsonl, and videos of some."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from vlarl.errors import VlarlError
from vlarl.observability.episodes import episode_row
from vlarl.observability.files import disk_errors
from vlarl.observability.samples import Phase
from vlarl.observability.video import Outcome, Video, write_video
from vlarl.types import EpisodeResult, Trajectory, UInt8Array


class EpisodeFolder(Protocol):
    """Where episodes are written: the folder of a run, or of an evaluation."""

    @property
    def episodes_file(self) -> Path:
        """One row per episode."""
        ...

    @property
    def videos(self) -> Path:
        """Folder of the videos."""
        ...


class EpisodeRecorder:
    """Writes episodes into a folder as they end, so that none is lost if the run stops."""

    def __init__(self, folder: EpisodeFolder) -> None:
        self._path = folder.episodes_file
        self._videos = folder.videos
        with disk_errors(self._path):
            self._file = self._path.open("a", buffering=1, encoding="utf-8")

    def record(
        self, iteration: int, phase: Phase, episodes: Iterable[Trajectory | EpisodeResult], policy_version: int = 0
    ) -> None:
        """Append one line per episode; `policy_version` is used for results, which don't carry their own."""
        for episode in episodes:
            row = {"iteration": iteration, "phase": phase, **_row(episode, policy_version)}
            with disk_errors(self._path):
                self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def write_videos(self, iteration: int, episodes: Collection[EpisodeResult], fps: int = 10) -> list[Video]:
        """Write a video of every episode that carries frames, named by iteration, task, state and outcome; the suite
        is named where there are several."""
        videos: list[Video] = []
        several = len({e.task.suite for e in episodes}) > 1
        for e in episodes:
            task = f"{e.task.suite}_" * several + f"task{e.task.task_id:02d}"
            name = f"iter_{iteration:04d}_{task}_state{e.task.init_state:02d}_{e.outcome}"
            path = self.write_video(name, e.frames, e.instruction, e.outcome, fps) if e.frames else None
            if path is not None:
                videos.append(Video(path, e.frames, e.instruction, e.outcome, fps))
        return videos

    def write_training_videos(self, iteration: int, episodes: Collection[EpisodeResult], several: bool) -> None:
        """Write a video of every training episode that carries frames; their names tell members of a group apart, and
        `several` suites."""
        for e in (episode for episode in episodes if episode.frames):
            task = f"{e.task.suite}_" * several + f"task{e.task.task_id:02d}_state{e.task.init_state:02d}"
            name = f"rollout_{iteration:04d}_{task}_group{e.task.group}_{e.task.member}_{e.outcome}"
            self.write_video(name, e.frames, e.instruction, e.outcome)

    def write_video(
        self, name: str, frames: Sequence[UInt8Array], instruction: str, outcome: Outcome, fps: int = 10
    ) -> Path | None:
        """Write a video; if it can't be encoded, only warn: a missing video must not end the run."""
        path = self._videos / f"{name}.mp4"
        try:
            write_video(path, frames, instruction, outcome, fps)
        except VlarlError as error:
            logging.getLogger(__name__).warning("%s", error)
            return None
        return path

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
        result, version = EpisodeResult.of(episode, episode.final_observation.instruction), episode.policy_version
    else:
        result, version = episode, policy_version
    task = episode.task
    return {**episode_row(result), "group": task.group, "member": task.member, "policy_version": version}
