"""LeRobot datasets of version 3.0, read without lerobot.

    folder/meta/info.json      features, frame rate, paths ─► info.py
           meta/tasks.parquet  the instructions ─► episodes.py
           meta/episodes/…     where each episode begins in the files ─► episodes.py
           data/…              steps of several episodes in a file; images, if they are not videos ─► tables.py
           videos/FEATURE/…    frames of several episodes in a file ─► video.py

A file of steps is checked when it is opened: its counters must be those that follow from meta/episodes; otherwise
every later step would silently be taken for one of another episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.config.dataset_folder import LEROBOT_INFO
from vlarl.data.lerobot.cache import BoundedCache
from vlarl.data.lerobot.declared import Declared, read_declared
from vlarl.data.lerobot.episodes import METADATA, EpisodeRow, read_episodes, read_tasks
from vlarl.data.lerobot.info import AGAIN, TASK, read_info
from vlarl.data.lerobot.tables import StepsFile
from vlarl.data.lerobot.video import decode
from vlarl.data.rlds.features import Field
from vlarl.data.rlds.image_headers import NotAnImageError, image_size
from vlarl.errors import UsageError
from vlarl.images.jpeg import decode_image
from vlarl.observability.machine import available_cores
from vlarl.types import IntArray, UInt8Array

MAX_CACHED_BYTES = 512 * 2**20  # of decoded videos, encoded images and values, each
FEW_FRAMES = 4  # are decoded in the calling thread, more of them in several threads


@lru_cache(maxsize=1)
def _decoders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cores(), thread_name_prefix="decode")


class LeRobotDataset:
    """The episodes of a dataset, by index."""

    def __init__(self, path: str | Path) -> None:
        """`path` is the folder that holds meta/info.json."""
        self.folder = Path(path)
        if not (self.folder / LEROBOT_INFO).is_file():
            raise UsageError(f"{path} holds no LeRobot dataset: there is no {LEROBOT_INFO} in it.")
        self.info = read_info(self.folder)
        self.declared: Declared = read_declared(self.folder)
        self.name = self.declared.name or self.folder.resolve().name
        self.tasks = read_tasks(self.folder)
        self.rows = read_episodes(self.info, self.folder)
        self.fields: Mapping[str, Field] = {
            **{name: feature.field() for name, feature in self.info.features.items()},
            TASK: Field("text"),
        }
        self._rows_of: dict[Path, list[EpisodeRow]] = {}
        for row in self.rows:
            self._rows_of.setdefault(row.data_path, []).append(row)
        self._files: dict[Path, StepsFile] = {}
        self._columns: BoundedCache[Any] = BoundedCache(MAX_CACHED_BYTES)
        self._encoded: BoundedCache[list[bytes]] = BoundedCache(MAX_CACHED_BYTES)
        self._videos: BoundedCache[UInt8Array] = BoundedCache(MAX_CACHED_BYTES)

    @property
    def fps(self) -> int:
        """Steps per second."""
        return self.info.fps

    @property
    def cameras(self) -> tuple[str, ...]:
        """The features that are images or videos."""
        return tuple(name for name, feature in self.info.features.items() if feature.kind == "image")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> LeRobotEpisode:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no episode {index}: {self.name} has {len(self)}")
        return LeRobotEpisode(self, self.rows[index])

    def __iter__(self) -> Iterator[LeRobotEpisode]:
        return (self[index] for index in range(len(self)))

    def column(self, row: EpisodeRow, name: str) -> Any:
        """The values or texts of a feature in an episode's steps."""
        feature = self.info.features[name]
        path = row.data_path

        def read() -> tuple[Any, int]:
            file = self._file(path)
            if feature.kind == "text":
                texts = file.texts(name)
                return texts, sum(len(text) for text in texts)
            values = file.values(name, feature)
            return values, values.nbytes

        start = row.first - self._first_step(path)
        return self._columns.get((path, name), read)[start : start + row.length]

    def encoded_image(self, row: EpisodeRow, name: str, step: int) -> bytes:
        """One image as it is stored."""
        file = self._file(row.data_path)
        position = row.first - self._first_step(row.data_path) + step
        group = file.group_of(position)

        def read() -> tuple[list[bytes], int]:
            images = file.encoded_images(name, group)
            return images, sum(map(len, images))

        return self._encoded.get((row.data_path, name, group), read)[position - file.first_row(group)]

    def video_frames(self, row: EpisodeRow, name: str, steps: Sequence[int] | IntArray) -> UInt8Array:
        """[n, H, W, 3] frames of a video; an episode that is read as a whole is kept for the next frames."""
        clip, size = row.clips[name], self.info.features[name].shape[:2]

        def read() -> tuple[UInt8Array, int]:
            frames = decode(clip.path, clip.start, row.length, self.fps, (size[0], size[1]))
            return frames, frames.nbytes

        return self._videos.get((name, row.index), read)[np.asarray(steps, np.int64)]

    def _first_step(self, path: Path) -> int:
        """The first step of a file among those of the dataset."""
        return self._rows_of[path][0].first

    def _file(self, path: Path) -> StepsFile:
        if path not in self._files:
            file = StepsFile(path)
            self._check_counters(file)
            self._files[path] = file
        return self._files[path]

    def _check_counters(self, file: StepsFile) -> None:
        """Refuse a file of steps whose counters are not those that follow from meta/episodes."""
        rows = self._rows_of[file.path]
        length = sum(row.length for row in rows)
        if len(file) != length:
            raise UsageError(
                f"{file.path} has {len(file):,} steps, and meta/episodes says {length:,} in {len(rows)} episodes: "
                f"{AGAIN}."
            )
        expected = {
            "index": np.arange(rows[0].first, rows[0].first + length),
            "episode_index": np.repeat([row.index for row in rows], [row.length for row in rows]),
            "frame_index": np.concatenate([np.arange(row.length) for row in rows]),
        }
        for name, wanted in expected.items():
            found = file.values(name, self.info.features[name])
            if len(wrong := np.flatnonzero(found != wanted)):
                at = int(wrong[0])
                raise UsageError(
                    f"{file.path} has {name} = {found[at]} in row {at}, and {wanted[at]} follows from meta/episodes: "
                    f"{AGAIN}."
                )


class LeRobotEpisode:
    """One episode; its features are decoded when they are read."""

    def __init__(self, dataset: LeRobotDataset, row: EpisodeRow) -> None:
        self._dataset, self.row = dataset, row

    def __len__(self) -> int:
        return self.row.length

    def values(self, name: str) -> NDArray[Any]:
        """[T, …] the values of a feature."""
        self._feature(name, "tensor")
        values: NDArray[Any] = self._dataset.column(self.row, name)
        return values

    def texts(self, name: str = TASK) -> list[str]:
        """The texts of a feature, one for each step; `task` is the instruction."""
        if name != TASK:
            self._feature(name, "text")
            return list(self._dataset.column(self.row, name))
        indices, tasks = self.values("task_index"), self._dataset.tasks
        if not ((indices >= 0) & (indices < len(tasks))).all():
            raise self.unreadable(f"a task_index is not that of one of {len(tasks)} tasks")
        return [tasks[index] for index in indices]

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What vlarl's writer noted of the episode."""
        return {name.removeprefix(METADATA): value for name, value in self.row.metadata.items()}

    def images(self, name: str, steps: Sequence[int] | IntArray | None = None) -> UInt8Array:
        """[n, H, W, 3] the frames of a camera at the given steps, at all by default."""
        self._feature(name, "image")
        feature = self._dataset.info.features[name]
        if feature.shape[2] != 3:
            raise self.unreadable(f"{name} has {feature.shape[2]} channels, and frames of 3 channels can be read")
        wanted = range(len(self)) if steps is None else steps
        if feature.dtype == "video":
            return self._dataset.video_frames(self.row, name, wanted)
        each = map if len(wanted) < FEW_FRAMES else _decoders().map
        frames = list(each(lambda step: self._image(name, int(step)), wanted))
        return np.stack(frames) if frames else np.zeros((0, *feature.shape), np.uint8)

    def _image(self, name: str, step: int) -> UInt8Array:
        data = self._dataset.encoded_image(self.row, name, step)
        wanted = self._dataset.info.features[name].shape[:2]
        try:
            size = image_size(memoryview(data))
            if size != wanted:
                raise NotAnImageError(f"has {size[0]} x {size[1]} pixels, and {wanted[0]} x {wanted[1]} in info.json")
            return decode_image(data)
        except Exception as error:  # noqa: BLE001 - what Pillow raises for damaged images is not documented
            raise self.unreadable(f"the image of step {step} in {name} {error}") from error

    def _feature(self, name: str, kind: str) -> None:
        fields = self._dataset.fields
        if name not in fields or fields[name].kind != kind:
            fitting = [known for known, one in fields.items() if one.kind == kind]
            raise UsageError(f"{self._where}: there is no {kind} feature {name!r}; there are {', '.join(fitting)}.")

    @property
    def _where(self) -> str:
        return f"{self.row.data_path}, episode {self.row.index}"

    def unreadable(self, reason: object) -> UsageError:
        """The error for this episode; it names the file."""
        return UsageError(f"{self._where} can't be read ({reason}): {AGAIN}.")
