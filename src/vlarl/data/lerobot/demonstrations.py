"""Writes demonstrations as a LeRobot dataset, for `vlarl data record`."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np

from vlarl.data.conventions import recorded_actions
from vlarl.data.lerobot.declared import REWARD, SUCCESS, Declared, suite_gripper
from vlarl.data.lerobot.info import Feature
from vlarl.data.lerobot.writer import LeRobotWriter
from vlarl.data.rlds.writer import CAMERAS
from vlarl.envs.base import Demonstration
from vlarl.errors import UsageError

STATE, ACTION = "observation.state", "action"


class DemonstrationWriter:
    """Adds demonstrations to a new dataset, ROOT/NAME. However its block ends, what was added is kept, unless it ends
    in the middle of an episode that is being written: half an episode would make the dataset unreadable."""

    def __init__(self, root: str | Path, name: str, fps: int, video: bool) -> None:
        self.name, self.folder = name, Path(root) / name
        self._fps, self._video = fps, video
        self._writer: LeRobotWriter | None = None
        if self.folder.exists():
            raise UsageError(f"{self.folder} exists already, and recordings are never overwritten: name a new folder.")

    def __enter__(self) -> DemonstrationWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        if len(self._writer) and not self._writer.is_adding:
            self._writer.finish()
        else:
            self._writer.discard()

    def __len__(self) -> int:
        return 0 if self._writer is None else len(self._writer)

    def add(self, episode: Demonstration) -> None:
        """Write one episode; its actions are recorded as in an RLDS dataset of the suite."""
        cameras = {
            f"observation.images.{CAMERAS[view]}": episode.images[:, view] for view in range(episode.images.shape[1])
        }
        if self._writer is None:
            self._writer = LeRobotWriter(
                self.folder,
                _features(episode, list(cameras), self._video),
                self._fps,
                Declared(name=self.name, gripper=suite_gripper(self.name)),
            )
        last = np.arange(len(episode.actions)) == len(episode.actions) - 1
        self._writer.add(
            {
                STATE: episode.proprio.astype(np.float32),
                ACTION: recorded_actions(self.name, episode.actions).astype(np.float32),
                REWARD: episode.rewards.astype(np.float32),
                SUCCESS: last & episode.success,
            },
            cameras,
            [episode.instruction] * len(episode.actions),
            {"file_path": episode.task.episode_id},
        )


def _features(episode: Demonstration, cameras: list[str], video: bool) -> dict[str, Feature]:
    size = episode.images.shape[2:]
    return {
        **{name: Feature("video" if video else "image", size, ["height", "width", "channels"]) for name in cameras},
        STATE: Feature("float32", episode.proprio.shape[1:], _names("state", episode.proprio.shape[1])),
        ACTION: Feature("float32", episode.actions.shape[1:], _names("action", episode.actions.shape[1])),
        REWARD: Feature("float32", (1,)),
        SUCCESS: Feature("bool", (1,)),
    }


def _names(name: str, count: int) -> list[str]:
    return [f"{name}_{index}" for index in range(count)]
