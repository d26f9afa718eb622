"""Writes LeRobot datasets of version 3.0, with images in Parquet files or as videos.

The dataset appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.config.dataset_folder import LEROBOT_INFO
from vlarl.data.lerobot.declared import FILE, Declared
from vlarl.data.lerobot.episodes import EPISODES, METADATA
from vlarl.data.lerobot.info import (
    COUNTER_FEATURES,
    DATA_PATH,
    EPISODES_PATH,
    MAX_FPS,
    STATS,
    TASKS,
    VERSION,
    VIDEO_PATH,
    Feature,
)
from vlarl.data.lerobot.reader import LeRobotDataset
from vlarl.data.lerobot.statistics import Histogram, TotalStatistics, flat_columns, frame_histogram, sampled_frames
from vlarl.data.lerobot.step_files import CHUNK_FILES, PARQUET, DataFiles, VideoFiles, data_path
from vlarl.data.lerobot.tables import arrow, read_table
from vlarl.data.lerobot.video import CODEC, PIXEL_FORMAT
from vlarl.data.parts import Part, link_or_copy, read_parts, swap, write_parts
from vlarl.errors import UsageError
from vlarl.images.jpeg import encode_png
from vlarl.observability.machine import available_cores
from vlarl.types import UInt8Array

META = "meta"
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200  # a larger file is followed by another one
MB = 2**20


@dataclass(frozen=True)
class EncodedFrames:
    """Frames of a camera as PNG, with what statistics need to know of them."""

    images: list[bytes]
    shape: tuple[int, ...]  # of a frame
    histogram: tuple[Histogram, int]

    @classmethod
    def of(cls, frames: UInt8Array) -> EncodedFrames:
        """Frames [T, H, W, 3]."""
        with ThreadPoolExecutor(available_cores()) as pool:
            return cls(list(pool.map(encode_png, frames)), frames.shape[1:], frame_histogram(frames))

    def __len__(self) -> int:
        return len(self.images)


Frames = UInt8Array | EncodedFrames


class LeRobotWriter:
    """Adds episodes to a new dataset. Use it as a context manager: an error inside leaves nothing behind."""

    def __init__(
        self,
        folder: str | Path,
        features: Mapping[str, Feature],
        fps: int,
        declared: Declared = Declared(),  # noqa: B008 - frozen
        *,
        robot: str = "unknown",
        overwrite: bool = False,
        data_file_mb: float = DATA_FILE_MB,
        video_file_mb: float = VIDEO_FILE_MB,
    ) -> None:
        self.folder, self.fps, self._declared, self._robot = Path(folder), fps, declared, robot
        self._pyarrow = arrow()
        self._limits = data_file_mb * MB, video_file_mb * MB
        self._features = {name: _described(name, feature, fps) for name, feature in features.items()}
        if not 1 <= fps <= MAX_FPS:
            raise UsageError(f"a dataset has 1 to {MAX_FPS} steps a second, not {fps}.")
        if self.folder.exists() and not overwrite:
            raise UsageError(f"{self.folder} exists already: name a new folder, or replace it with --overwrite.")
        self._partial = self.folder.with_name(f".{self.folder.name}.partial")
        try:
            shutil.rmtree(self._partial, ignore_errors=True)  # left by a killed process
            self._partial.mkdir(parents=True)
        except OSError as error:
            parent = self.folder.parent
            raise UsageError(f"cannot write to {parent} ({error.strerror}): name a folder you can write to.") from error
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._num_steps = 0
        self._parts: list[Part] = []
        self.is_adding = False  # an episode is, or was left, halfway written
        self._statistics = TotalStatistics()
        self._data = DataFiles(self._partial, self._limits[0])
        self._videos: dict[str, VideoFiles] = {
            name: VideoFiles(self._partial, name, fps, feature.shape[:2], self._limits[1])
            for name, feature in self._features.items()
            if feature.dtype == "video"
        }

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._episodes:
            self.finish()
        else:
            self.discard()

    def __len__(self) -> int:
        return len(self._episodes)

    def add(
        self,
        values: Mapping[str, NDArray[Any] | Sequence[str]],
        cameras: Mapping[str, Frames],
        instructions: Sequence[str],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Write one episode of T steps: arrays [T, …] or texts, frames [T, H, W, 3], and the instruction at each step.

        `metadata` are texts and values that describe the episode, the same names for all episodes.
        """
        length = len(instructions)
        self._check(values, cameras, length)
        images = {
            name: frames if isinstance(frames, EncodedFrames) else EncodedFrames.of(frames)
            for name, frames in cameras.items()
            if name not in self._videos
        }
        videos = {name: frames for name, frames in cameras.items() if not isinstance(frames, EncodedFrames)}
        histograms = {
            name: images[name].histogram if name in images else frame_histogram(videos[name]) for name in cameras
        }
        tasks = [self._tasks.setdefault(text, len(self._tasks)) for text in instructions]
        index = len(self._episodes)
        counters: dict[str, NDArray[Any]] = {
            "timestamp": (np.arange(length) / self.fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, index),
            "index": np.arange(self._num_steps, self._num_steps + length),
            "task_index": np.array(tasks, np.int64),
        }
        numeric = {name: np.asarray(array) for name, array in values.items() if self._features[name].kind == "tensor"}
        self.is_adding = True
        statistics = self._statistics.add({**numeric, **counters}, histograms)
        chunk, file = self._data.write(self._table({**values, **counters}, images))
        clips: dict[str, Any] = {}
        for name, video in self._videos.items():
            clips |= video.write(videos[name])
        self._episodes.append(
            {
                "episode_index": index,
                "tasks": list(dict.fromkeys(instructions)),
                "length": length,
                "data/chunk_index": chunk,
                "data/file_index": file,
                "dataset_from_index": self._num_steps,
                "dataset_to_index": self._num_steps + length,
                **clips,
                **{f"{METADATA}{name}": value for name, value in (metadata or {}).items()},
                **flat_columns(statistics),
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
        )
        self._num_steps += length
        self.is_adding = False

    def finish(self) -> None:
        """Complete the dataset and give it its name."""
        self._data.close()
        for video in self._videos.values():
            video.close()
        pyarrow = self._pyarrow
        path = self._partial / EPISODES_PATH.format(chunk_index=0, file_index=0)
        path.parent.mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self._episodes), path, **PARQUET)
        pyarrow.parquet.write_table(_task_table(pyarrow, list(self._tasks)), self._partial / TASKS, **PARQUET)
        _write_json(self._partial / STATS, self._statistics.total())
        _write_json(self._partial / FILE, self._declared.to_json())
        _write_json(self._partial / LEROBOT_INFO, self._info())
        write_parts(self._partial / META, self._parts)
        swap(self._partial, self.folder)

    def end_part(self, iteration: int) -> None:
        """Note that the episodes of a training iteration are complete: the next ones go into another file."""
        self._data.close()
        self._parts.append(Part(iteration, self._data.count, len(self)))

    def grow(self) -> None:
        """Continue a dataset of images that is finished: the next `finish` replaces it by one with further episodes."""
        self._partial.mkdir(parents=True)
        self._take_files(self.folder)

    @classmethod
    def reopened(cls, folder: str | Path, part: Part) -> LeRobotWriter:
        """The writer of a finished dataset of images with its parts up to this one, to grow it."""
        dataset = LeRobotDataset(folder)
        writer = cls(folder, dataset.info.own_features, dataset.fps, dataset.declared, overwrite=True)
        writer._data.count = part.files
        writer._take_files(dataset.folder)
        writer._parts = [each for each in read_parts(dataset.folder / META) if each.iteration <= part.iteration]
        tables = [read_table(path) for path in sorted((dataset.folder / EPISODES).glob("*/*.parquet"))]
        writer._episodes = [row for table in tables for row in table.to_pylist()][: part.episodes]
        numeric = [name for name, feature in dataset.info.features.items() if feature.kind == "tensor"]
        for index in range(part.episodes):
            episode = dataset[index]
            values = {name: episode.values(name) for name in numeric}
            sampled = sampled_frames(len(episode))
            writer._statistics.add(
                values, {name: frame_histogram(episode.images(name, sampled)) for name in dataset.cameras}
            )
            for text in episode.texts():
                writer._tasks.setdefault(text, len(writer._tasks))
            writer._num_steps += len(episode)
        return writer

    def _take_files(self, folder: Path) -> None:
        for index in range(self._data.count):
            path = data_path(index)
            link_or_copy(folder / path, self._partial / path)

    def discard(self) -> None:
        """Remove what was written."""
        self._data.close()
        for video in self._videos.values():
            video.discard()
        shutil.rmtree(self._partial, ignore_errors=True)

    def _check(
        self, values: Mapping[str, NDArray[Any] | Sequence[str]], cameras: Mapping[str, Frames], length: int
    ) -> None:
        given: dict[str, NDArray[Any] | Sequence[str] | EncodedFrames] = {**values, **cameras}
        if set(given) != set(self._features):
            raise ValueError(f"an episode has {', '.join(self._features)}, not {', '.join(given)}")
        if not length:
            raise ValueError("an episode has at least one step")
        for name, array in given.items():
            feature = self._features[name]
            shape = () if feature.is_scalar or feature.kind == "text" else feature.shape
            inner = array.shape if isinstance(array, EncodedFrames) else np.shape(array)[1:]
            if (found := (len(array), *inner)) != (length, *shape):
                raise ValueError(f"{name} has the shape {found}, and {(length, *shape)} is needed")

    def _table(self, values: Mapping[str, Any], cameras: Mapping[str, EncodedFrames]) -> Any:
        """The steps of an episode as a table, in the layout of Hugging Face's datasets."""
        pyarrow = self._pyarrow
        columns: dict[str, Any] = {}
        described: dict[str, Any] = {}
        for name, feature in {**self._features, **COUNTER_FEATURES}.items():
            if feature.dtype == "video":
                continue
            if feature.dtype == "image":
                kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
                rows = [{"bytes": image, "path": None} for image in cameras[name].images]
                columns[name], described[name] = pyarrow.array(rows, kind), {"_type": "Image"}
                continue
            inner = {"dtype": feature.dtype, "_type": "Value"}
            if feature.kind == "text":
                columns[name], described[name] = pyarrow.array(list(values[name]), pyarrow.string()), inner
                continue
            array = np.ascontiguousarray(values[name]).astype(feature.dtype)
            flat = pyarrow.array(array.reshape(-1))
            if feature.shape == (1,):
                columns[name], described[name] = flat, inner
            else:
                columns[name] = pyarrow.FixedSizeListArray.from_arrays(flat, feature.shape[0])
                described[name] = {"feature": inner, "length": feature.shape[0], "_type": "List"}
        metadata = {"huggingface": json.dumps({"info": {"features": described}})}
        return pyarrow.table(columns).replace_schema_metadata(metadata)

    def _info(self) -> dict[str, Any]:
        features = {**self._features, **COUNTER_FEATURES}
        return {
            "codebase_version": VERSION,
            "robot_type": self._robot,
            "total_episodes": len(self._episodes),
            "total_frames": self._num_steps,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK_FILES,
            "data_files_size_in_mb": DATA_FILE_MB,
            "video_files_size_in_mb": VIDEO_FILE_MB,
            "fps": self.fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._videos else None,
            "features": {name: feature.to_json() for name, feature in features.items()},
        }


def _described(name: str, feature: Feature, fps: int) -> Feature:
    """A feature as it is written, or why it can't be."""
    if "/" in name or name in COUNTER_FEATURES:
        raise UsageError(f"{name!r} can't be the name of a feature of a LeRobot dataset: leave the field out.")
    if feature.kind == "tensor" and len(feature.shape) != 1:
        raise UsageError(
            f"{name} has the shape {list(feature.shape)}; values of a LeRobot dataset are written as vectors: leave "
            "the field out."
        )
    if feature.kind == "image" and (len(feature.shape) != 3 or feature.shape[2] != 3):
        raise UsageError(
            f"{name} has frames of the shape {list(feature.shape)}, not of 3 channels: leave the field out."
        )
    if feature.dtype != "video":
        return feature
    height, width, channels = feature.shape
    if height % 2 or width % 2:
        raise UsageError(f"{name} has frames of {height} x {width} pixels, and videos have even sizes: write images.")
    info = {
        "video.height": height,
        "video.width": width,
        "video.codec": CODEC,
        "video.pix_fmt": PIXEL_FORMAT,
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": channels,
        "has_audio": False,
    }
    return Feature("video", feature.shape, feature.names, info)


def _task_table(pyarrow: Any, tasks: list[str]) -> Any:
    """The instructions as pandas would write them with the texts as index, which is how lerobot reads them."""
    texts = "__index_level_0__"
    named = {"metadata": None, "name": "task_index", "field_name": "task_index"}
    index = {"metadata": None, "name": None, "field_name": texts}
    pandas: dict[str, Any] = {
        "index_columns": [texts],
        "column_indexes": [
            {**named, "name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
        ],
        "columns": [
            {**named, "pandas_type": "int64", "numpy_type": "int64"},
            {**index, "pandas_type": "unicode", "numpy_type": "object"},
        ],
        "creator": {"library": "pyarrow", "version": pyarrow.__version__},
        "pandas_version": "2.2.0",
    }
    table = pyarrow.table({"task_index": pyarrow.array(range(len(tasks)), pyarrow.int64()), texts: tasks})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
