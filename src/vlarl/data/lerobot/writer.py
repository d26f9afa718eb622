"""Writes LeRobot datasets of version 3.0, with images in Parquet files or as videos.

The dataset appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.config.dataset_folder import LEROBOT_INFO
from vlarl.data.lerobot.declared import FILE, Declared
from vlarl.data.lerobot.episodes import METADATA
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
from vlarl.data.lerobot.statistics import TotalStatistics, flat_columns
from vlarl.data.lerobot.tables import arrow
from vlarl.data.lerobot.video import CODEC, PIXEL_FORMAT, VideoWriter
from vlarl.errors import UsageError
from vlarl.images.jpeg import encode_png
from vlarl.observability.machine import available_cores
from vlarl.types import UInt8Array

CHUNK_FILES = 1000  # files in a folder
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200  # a larger file is followed by another one
MB = 2**20
PARQUET = {"compression": "snappy", "write_page_checksum": True}


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
        self.is_adding = False  # an episode is, or was left, halfway written
        self._statistics = TotalStatistics()
        self._data = _DataFiles(self._partial, self._limits[0])
        self._videos: dict[str, _VideoFiles] = {
            name: _VideoFiles(self._partial, name, fps, feature.shape[:2], self._limits[1])
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
        cameras: Mapping[str, UInt8Array],
        instructions: Sequence[str],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Write one episode of T steps: arrays [T, …] or texts, frames [T, H, W, 3], and the instruction at each step.

        `metadata` are texts and values that describe the episode, the same names for all episodes.
        """
        length = len(instructions)
        self._check(values, cameras, length)
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
        statistics = self._statistics.add({**numeric, **counters}, cameras)
        chunk, file = self._data.write(self._table({**values, **counters}, cameras))
        clips: dict[str, Any] = {}
        for name, video in self._videos.items():
            clips |= video.write(cameras[name])
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
        aside = self.folder.with_name(f".{self.folder.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(aside)
        self._partial.rename(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written."""
        self._data.close()
        for video in self._videos.values():
            video.discard()
        shutil.rmtree(self._partial, ignore_errors=True)

    def _check(
        self, values: Mapping[str, NDArray[Any] | Sequence[str]], cameras: Mapping[str, UInt8Array], length: int
    ) -> None:
        given = {**values, **cameras}
        if set(given) != set(self._features):
            raise ValueError(f"an episode has {', '.join(self._features)}, not {', '.join(given)}")
        if not length:
            raise ValueError("an episode has at least one step")
        for name, array in given.items():
            feature = self._features[name]
            shape = () if feature.is_scalar or feature.kind == "text" else feature.shape
            if len(array) != length or (isinstance(array, np.ndarray) and array.shape[1:] != shape):
                found = array.shape if isinstance(array, np.ndarray) else (len(array),)
                raise ValueError(f"{name} has the shape {found}, and {(length, *shape)} is needed")

    def _table(self, values: Mapping[str, Any], cameras: Mapping[str, UInt8Array]) -> Any:
        """The steps of an episode as a table, in the layout of Hugging Face's datasets."""
        pyarrow = self._pyarrow
        columns: dict[str, Any] = {}
        described: dict[str, Any] = {}
        for name, feature in {**self._features, **COUNTER_FEATURES}.items():
            if feature.dtype == "video":
                continue
            if feature.dtype == "image":
                with ThreadPoolExecutor(available_cores()) as pool:
                    images = list(pool.map(encode_png, cameras[name]))
                kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
                rows = [{"bytes": image, "path": None} for image in images]
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


class _DataFiles:
    """Files of steps, a group of rows for each episode, so that an episode can be read alone."""

    def __init__(self, folder: Path, max_bytes: float) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._count = 0
        self._writer: Any = None
        self._path = folder

    def write(self, table: Any) -> tuple[int, int]:
        """Append an episode; return the indices of chunk and file."""
        if self._writer is not None and self._path.stat().st_size >= self._max_bytes:
            self.close()
        if self._writer is None:
            chunk, file = divmod(self._count, CHUNK_FILES)
            self._path = self._folder / DATA_PATH.format(chunk_index=chunk, file_index=file)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = arrow().parquet.ParquetWriter(self._path, table.schema, **PARQUET)
            self._count += 1
        self._writer.write_table(table)
        return divmod(self._count - 1, CHUNK_FILES)

    def close(self) -> None:
        """Complete the file that is open."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _VideoFiles:
    """Videos of a camera, the episodes one after the other."""

    def __init__(self, folder: Path, name: str, fps: int, size: tuple[int, ...], max_bytes: float) -> None:
        self._folder, self._name, self._fps = folder, name, fps
        self._size, self._max_bytes = (size[0], size[1]), max_bytes
        self._count = 0
        self._video: VideoWriter | None = None

    def write(self, frames: UInt8Array) -> dict[str, Any]:
        """Append an episode; return its columns in meta/episodes."""
        if self._video is not None and self._video.num_bytes >= self._max_bytes:
            self.close()
        if self._video is None:
            chunk, file = divmod(self._count, CHUNK_FILES)
            name = VIDEO_PATH.format(video_key=self._name, chunk_index=chunk, file_index=file)
            self._video = VideoWriter(self._folder / name, self._fps, self._size)
            self._count += 1
        start = self._video.num_frames
        self._video.add(frames)
        chunk, file = divmod(self._count - 1, CHUNK_FILES)
        columns = {
            "chunk_index": chunk,
            "file_index": file,
            "from_timestamp": start / self._fps,
            "to_timestamp": self._video.num_frames / self._fps,
        }
        return {f"videos/{self._name}/{column}": value for column, value in columns.items()}

    def close(self) -> None:
        """Complete the video that is open."""
        if self._video is not None:
            self._video.close()
            self._video = None

    def discard(self) -> None:
        """End without completing the video that is open."""
        if self._video is not None:
            self._video.discard()
            self._video = None


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
