"""meta/info.json of a LeRobot dataset: features, frame rate, and where the files are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from vlarl.config.dataset_folder import LEROBOT_INFO
from vlarl.data.rlds.features import DTYPES, MAX_VALUES, Field
from vlarl.errors import UsageError
from vlarl.json_files import read_json

VERSION = "v3.0"
AGAIN = "copy or download the dataset again"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
TASKS, STATS = "meta/tasks.parquet", "meta/stats.json"
TASK = "task"  # the name of the instruction among the fields
MAX_FPS = 1000
MAX_PATH = 1000  # characters
MAX_DIGITS = 9

# Columns that every dataset has, beside its own features.
COUNTERS = ("timestamp", "frame_index", "episode_index", "index", "task_index")

_CONVERTERS = {
    "v2.1": "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=NAME, a program of lerobot 0.4",
    "v2.0": "lerobot's convert_dataset_v20_to_v21, and its result with convert_dataset_v21_to_v30",
}
_HOLE = re.compile(r"\{(\w+)(?::0(\d)d)?\}")


@dataclass(frozen=True)
class Feature:
    """A column of the data, or a video."""

    dtype: str  # numpy's name, or image, video, string
    shape: tuple[int, ...]
    names: Any = None
    info: Mapping[str, Any] | None = None  # of a video

    @property
    def kind(self) -> Literal["tensor", "image", "text"]:
        """What a step of it is."""
        if self.dtype in ("image", "video"):
            return "image"
        return "text" if self.dtype == "string" else "tensor"

    @property
    def is_scalar(self) -> bool:
        """Whether a step is one value rather than a list of one: LeRobot writes [1] for both."""
        return self.shape == (1,) and self.names is None

    def field(self) -> Field:
        """The feature as a field of a recording."""
        if self.kind == "text":
            return Field("text")
        if self.kind == "image":
            return Field("image", "uint8", self.shape)
        return Field("tensor", self.dtype, () if self.is_scalar else self.shape)

    def to_json(self) -> dict[str, Any]:
        """The feature as info.json has it."""
        written = {"dtype": self.dtype, "shape": list(self.shape), "names": self.names}
        return written if self.info is None else {**written, "info": dict(self.info)}


COUNTER_FEATURES = {name: Feature("float32" if name == "timestamp" else "int64", (1,)) for name in COUNTERS}


@dataclass(frozen=True)
class Info:
    """What meta/info.json says."""

    path: Path
    features: Mapping[str, Feature]  # counters included
    fps: int
    num_episodes: int
    num_steps: int
    data_path: str
    video_path: str | None
    robot: str | None

    @property
    def own_features(self) -> dict[str, Feature]:
        """The features without counters."""
        return {name: feature for name, feature in self.features.items() if name not in COUNTERS}

    def data_file(self, chunk: int, file: int) -> Path:
        """A file of steps."""
        return self._located(self.data_path, {"chunk_index": chunk, "file_index": file})

    def video_file(self, key: str, chunk: int, file: int) -> Path:
        """A file of frames."""
        if self.video_path is None:
            raise malformed(self.path, f"{key} is a video, but there is no video_path")
        return self._located(self.video_path, {"video_key": key, "chunk_index": chunk, "file_index": file})

    def _located(self, template: str, values: Mapping[str, str | int]) -> Path:
        """The path of a file below the dataset's folder; not by str.format, which would follow attributes."""

        def fill(found: re.Match[str]) -> str:
            value = values.get(found[1], found[0])
            return f"{value:0{found[2]}d}" if isinstance(value, int) and found[2] else str(value)

        name = _HOLE.sub(fill, template)
        relative = PurePosixPath(name)
        if "{" in name or relative.is_absolute() or ".." in relative.parts or len(name) > MAX_PATH or "\0" in name:
            raise malformed(self.path, f"the path {template[:80]!r} does not name a file of the dataset")
        return self.path.parents[1] / relative


def malformed(path: Path, reason: object) -> UsageError:
    """The error for a file whose content is wrong."""
    return UsageError(f"{path} is malformed ({reason}): {AGAIN}.")


def read_info(folder: Path) -> Info:
    """Read and check meta/info.json."""
    path = folder / LEROBOT_INFO
    content = json_object(path)
    _check_version(path, str(content.get("codebase_version", "without a version")))
    try:
        features = {str(name): _feature(str(name), one) for name, one in content["features"].items()}
        info = Info(
            path=path,
            features=features,
            fps=_integer(content["fps"], "fps", 1, MAX_FPS),
            num_episodes=_integer(content["total_episodes"], "total_episodes", 0),
            num_steps=_integer(content["total_frames"], "total_frames", 0),
            data_path=str(content.get("data_path") or DATA_PATH),
            video_path=None if content.get("video_path") is None else str(content["video_path"]),
            robot=None if content.get("robot_type") is None else str(content["robot_type"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise malformed(path, reason) from error
    if missing := [name for name in COUNTERS if name not in features]:
        raise malformed(path, f"it describes no {', '.join(missing)}")
    return info


def json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file of the dataset."""
    try:
        content = read_json(path)
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}): {AGAIN}.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}): {AGAIN}.") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} does not hold a JSON object: {AGAIN}.")
    return content


def _check_version(path: Path, version: str) -> None:
    if version == VERSION:
        return
    given = f"{path} is a LeRobot dataset of version {version[:20]!r}, and {VERSION} can be read"
    if version in _CONVERTERS:
        raise UsageError(f"{given}: convert it with {_CONVERTERS[version]}.")
    if version.startswith("v1"):
        raise UsageError(
            f"{given}: convert it to v2.0 with the lerobot that wrote it, then with {_CONVERTERS['v2.0']}."
        )
    raise UsageError(f"{given}: write it again with lerobot 0.4, or convert it with lerobot's own programs.")


def _feature(name: str, content: Any) -> Feature:
    dtype, names, info = str(content["dtype"]), content.get("names"), content.get("info")
    shape = tuple(_integer(size, f"a size of {name}", 1) for size in content["shape"])
    if math.prod(shape) > MAX_VALUES:
        raise ValueError(f"{name} has the shape {list(shape)}, more than {MAX_VALUES:,} values")
    if dtype not in (*DTYPES, "image", "video", "string"):
        raise ValueError(f"{name} has the dtype {dtype!r}; known are image, video, string, {', '.join(DTYPES)}")
    if dtype in ("image", "video"):
        if len(shape) != 3:
            raise ValueError(f"{name} has the shape {list(shape)}, but frames have height, width and channels")
        if isinstance(names, list) and names and str(names[0]).startswith("channel"):
            shape = (*shape[1:], shape[0])
    return Feature(dtype, shape, names, info if isinstance(info, dict) else None)


def _integer(value: Any, name: str, least: int, most: int = 10**MAX_DIGITS) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{name} is {value!r}, not an integer")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}, not between {least} and {most:,}")
    return int(value)
