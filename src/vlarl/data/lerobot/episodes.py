"""meta/tasks.parquet and meta/episodes: the instructions, and where the steps and frames of every episode are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlarl.data.lerobot.info import AGAIN, TASKS, Info, malformed
from vlarl.data.lerobot.tables import arrow, parquet_file, read_table, reading, refuse_missing
from vlarl.data.rlds.features import Field
from vlarl.errors import UsageError

EPISODES = "meta/episodes"
METADATA = "episode_metadata/"  # columns that describe an episode, which vlarl writes beside lerobot's


@dataclass(frozen=True)
class Clip:
    """The frames of an episode in a video."""

    path: Path
    start: float  # seconds


@dataclass(frozen=True)
class EpisodeRow:
    """What meta/episodes says of an episode."""

    index: int
    length: int
    first: int  # of its steps among those of the dataset
    data_path: Path
    clips: Mapping[str, Clip]  # by feature
    metadata: Mapping[str, Any]  # columns of METADATA


def read_tasks(folder: Path) -> tuple[str, ...]:
    """The instructions by their index."""
    path = folder / TASKS
    table = read_table(path, ["task_index"])
    names = [name for name in _schema_names(path) if name != "task_index"]
    text = next((name for name in ("task", "__index_level_0__") if name in names), names[0] if names else None)
    if text is None:
        raise malformed(path, "it has no column with the texts")
    texts = read_table(path, [text])
    with reading(path):
        by_index = dict(zip(table.column("task_index").to_pylist(), texts.column(text).to_pylist(), strict=True))
        if sorted(by_index) != list(range(len(by_index))) or len(by_index) != table.num_rows:
            raise ValueError("its task_index does not count from 0 on")
        if any(not isinstance(text, str) for text in by_index.values()):
            raise ValueError("a task is not a text")
    return tuple(by_index[index] for index in range(len(by_index)))


def read_episodes(info: Info, folder: Path) -> tuple[EpisodeRow, ...]:
    """All episodes in their order, checked against each other and against info.json."""
    files = sorted((folder / EPISODES).glob("*/*.parquet"))
    if not files:
        raise UsageError(f"{folder / EPISODES} holds no file of episodes: {AGAIN}.")
    rows: list[EpisodeRow] = []
    for path in files:
        for content in _rows(info, path):
            rows.append(_row(info, path, content, rows[-1] if rows else None))
    num_steps = sum(row.length for row in rows)
    if len(rows) != info.num_episodes or num_steps != info.num_steps:
        raise UsageError(
            f"{folder / EPISODES} describes {len(rows):,} episodes of {num_steps:,} steps, and {info.path} says "
            f"{info.num_episodes:,} episodes of {info.num_steps:,} steps: {AGAIN}."
        )
    if not rows:
        raise UsageError(f"{folder} has no episodes: {AGAIN}.")
    return tuple(rows)


def metadata_fields(folder: Path) -> dict[str, Field]:
    """What describes an episode, by the names of METADATA: texts and single values."""
    path = sorted((folder / EPISODES).glob("*/*.parquet"))[0]
    refuse_missing(path)
    fields = {}
    with reading(path):
        types = arrow().types
        for column in parquet_file(path).schema_arrow:
            if not column.name.startswith(METADATA):
                continue
            if types.is_string(column.type) or types.is_large_string(column.type):
                fields[column.name] = Field("text")
            else:
                fields[column.name] = Field("tensor", np.dtype(column.type.to_pandas_dtype()).name)
    return fields


def _schema_names(path: Path) -> list[str]:
    refuse_missing(path)
    with reading(path):
        return list(parquet_file(path).schema_arrow.names)


def _rows(info: Info, path: Path) -> list[dict[str, Any]]:
    names = ["episode_index", "length", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index"]
    for key, feature in info.features.items():
        if feature.dtype == "video":
            names += [f"videos/{key}/{part}" for part in ("chunk_index", "file_index", "from_timestamp")]
    extra = [name for name in _schema_names(path) if name.startswith(METADATA)]
    table = read_table(path, [*names, *extra])
    with reading(path):
        rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _row(info: Info, path: Path, content: Mapping[str, Any], before: EpisodeRow | None) -> EpisodeRow:
    index = 0 if before is None else before.index + 1
    first = 0 if before is None else before.first + before.length
    where = f"episode {index}"

    def count(name: str) -> int:
        value = content[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise malformed(path, f"{where} has {name} = {value!r}")
        return value

    for name, expected in (("episode_index", index), ("dataset_from_index", first)):
        if count(name) != expected:
            raise malformed(path, f"{where} has {name} = {content[name]}, and {expected} follows from those before it")
    length = count("length")
    if length < 1 or count("dataset_to_index") != first + length:
        raise malformed(path, f"{where} has {length} steps, from {first} to {content['dataset_to_index']}")
    clips = {}
    for key, feature in info.features.items():
        if feature.dtype == "video":
            start = content[f"videos/{key}/from_timestamp"]
            if not isinstance(start, float | int) or not np.isfinite(start) or start < 0:
                raise malformed(path, f"{where} begins at {start!r} in the video of {key}")
            at = count(f"videos/{key}/chunk_index"), count(f"videos/{key}/file_index")
            clips[key] = Clip(info.video_file(key, *at), float(start))
    data_path = info.data_file(count("data/chunk_index"), count("data/file_index"))
    metadata = {name: value for name, value in content.items() if name.startswith(METADATA)}
    return EpisodeRow(index, length, first, data_path, clips, metadata)
