"""Writes demonstrations as a LeRobot dataset, for `vlarl data record`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.data.conventions import recorded_actions
from vlarl.data.lerobot.declared import REWARD, SUCCESS, Declared, suite_gripper
from vlarl.data.lerobot.info import Feature
from vlarl.data.lerobot.writer import EncodedFrames, Frames, LeRobotWriter
from vlarl.data.parts import Part
from vlarl.data.rlds.writer import camera
from vlarl.envs.base import Demonstration
from vlarl.errors import UsageError

STATE, ACTION = "observation.state", "action"


class DemonstrationWriter:
    """Adds demonstrations to a new dataset, ROOT/NAME. However its block ends, what was added is kept, unless it ends
    in the middle of an episode that is being written: half an episode would make the dataset unreadable."""

    def __init__(self, root: str | Path, name: str, fps: int, video: bool, replaces: bool = False) -> None:
        """`replaces`: the dataset may be there already."""
        self.name, self.folder = name, Path(root) / name
        self._fps, self._video = fps, video
        self._writer: LeRobotWriter | None = None
        if self.folder.exists() and not replaces:
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
        self.add_encoded(EncodedEpisode.of(self.name, episode, self._video))

    def add_encoded(self, episode: EncodedEpisode) -> None:
        """Write one episode."""
        if self._writer is None:
            declared = Declared(name=self.name, gripper=suite_gripper(self.name) or "as_recorded")
            self._writer = LeRobotWriter(self.folder, episode.features, self._fps, declared)
        self._writer.add(episode.values, episode.cameras, episode.instructions, episode.metadata)

    def end_part(self, iteration: int) -> None:
        """Note that the episodes of a training iteration are complete."""
        self._written.end_part(iteration)

    def finish(self) -> None:
        """Complete the dataset and give it its name."""
        self._written.finish()

    def grow(self) -> None:
        """Continue a dataset that is finished: the next `finish` replaces it by one with further episodes."""
        self._written.grow()

    def discard(self) -> None:
        """Remove what was written since the dataset was finished."""
        if self._writer is not None:
            self._writer.discard()

    @classmethod
    def reopened(cls, root: str | Path, name: str, part: Part) -> DemonstrationWriter:
        """The writer of a finished dataset of images with its parts up to this one, to grow it."""
        opened = LeRobotWriter.reopened(Path(root) / name, part)
        writer = cls(root, name, opened.fps, video=False, replaces=True)
        writer._writer = opened
        return writer

    @property
    def _written(self) -> LeRobotWriter:
        if self._writer is None:
            raise ValueError(f"no episode of {self.name} has been added")
        return self._writer


@dataclass(frozen=True)
class EncodedEpisode:
    """An episode as a dataset of images holds it, which takes less memory than its frames; or with them, for videos."""

    features: dict[str, Feature]
    values: dict[str, NDArray[Any]]
    cameras: dict[str, Frames]
    instructions: list[str]
    metadata: dict[str, str]

    @classmethod
    def of(cls, name: str, episode: Demonstration, video: bool = False) -> EncodedEpisode:
        """An episode of the dataset with this name."""
        frames = {
            f"observation.images.{camera(view)}": episode.images[:, view] for view in range(episode.images.shape[1])
        }
        last = np.arange(len(episode.actions)) == len(episode.actions) - 1
        return cls(
            _features(episode, list(frames), video),
            {
                STATE: episode.proprio.astype(np.float32),
                ACTION: recorded_actions(name, episode.actions).astype(np.float32),
                REWARD: episode.rewards.astype(np.float32),
                SUCCESS: last & episode.success,
            },
            {key: each if video else EncodedFrames.of(each) for key, each in frames.items()},
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
