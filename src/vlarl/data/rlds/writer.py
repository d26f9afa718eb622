"""Writes episodes as an RLDS dataset, in the layout of the LIBERO data that OpenVLA was trained on.

    folder/NAME/1.0.0/   dataset_info.json  features.json  shards, as `reader.py` and TensorFlow Datasets read them
                         dataset_statistics.json   the normalisation statistics for a policy's checkpoint

Shards are written as the episodes arrive; the dataset gets its name when it is complete. A dataset that Ctrl-C or an
error cut short holds the episodes up to that point.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from vlarl.config.dataset_folder import INFO
from vlarl.data.conventions import recorded_actions
from vlarl.data.rlds.features import Field, features_json
from vlarl.data.rlds.reader import FEATURES, STEPS, TEMPLATE
from vlarl.data.rlds.tf_example import Feature, encode_example
from vlarl.data.rlds.tfrecord import write_record
from vlarl.data.statistics import dataset_statistics
from vlarl.envs.base import Demonstration
from vlarl.errors import UsageError
from vlarl.images.jpeg import encode_jpeg

VERSION = "1.0.0"
STATISTICS = "dataset_statistics.json"
CAMERAS = ("image", "wrist_image")  # in the order of an observation's views
OBSERVATION = f"{STEPS}observation/"
SHARD_BYTES = 128 * 2**20


class RldsWriter:
    """Adds episodes to a new dataset. Use it as a context manager."""

    def __init__(self, root: str | Path, name: str, shard_bytes: int = SHARD_BYTES, overwrite: bool = False) -> None:
        self.name = name
        self.folder = Path(root) / name / VERSION
        self._partial = self.folder.with_name(f".{VERSION}.partial")
        self._shard_bytes = shard_bytes
        self._shard_lengths: list[int] = []
        self._num_bytes = 0
        self._file: BinaryIO | None = None
        self._fields: dict[str, Field] = {}
        self._actions: list[np.ndarray] = []
        self._states: list[np.ndarray] = []
        if self.folder.exists() and not overwrite:
            raise UsageError(f"{self.folder} exists already, and recordings are never overwritten: name a new folder.")
        try:
            shutil.rmtree(self._partial, ignore_errors=True)  # left by a killed process
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"cannot write to {root} ({error.strerror}): name a folder you can write to.") from error

    def __enter__(self) -> RldsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def __len__(self) -> int:
        return sum(self._shard_lengths)

    def add(self, episode: Demonstration) -> None:
        """Write one episode."""
        values = episode_features(self.name, episode)
        self.add_values(episode_fields(episode), values, episode.actions, episode.proprio)

    def add_values(
        self,
        fields: dict[str, Field],
        values: Mapping[str, Feature],
        actions: np.ndarray | None = None,
        states: np.ndarray | None = None,
    ) -> None:
        """Write one episode of any fields; with actions in a policy's convention and states, statistics are written."""
        if self._fields and fields != self._fields:
            raise ValueError(f"episodes of one dataset have the same fields: {fields} after {self._fields}")
        self._fields = fields
        data = encode_example(values)
        if self._file is None or self._file.tell() + len(data) > self._shard_bytes:
            self._next_shard()
        assert self._file is not None
        write_record(self._file, data)
        self._shard_lengths[-1] += 1
        self._num_bytes += len(data)
        if actions is not None and states is not None:
            self._actions.append(actions)
            self._states.append(states)

    def finish(self) -> None:
        """Name and describe the shards; without episodes nothing is left."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if not self._partial.exists():
            return
        if not len(self):
            shutil.rmtree(self._partial)
            return
        count = len(self._shard_lengths)
        for index in range(count):
            name = TEMPLATE.format(
                DATASET=self.name,
                SPLIT="train",
                FILEFORMAT="tfrecord",
                SHARD_X_OF_Y=f"{index:05d}-of-{count:05d}",
            )
            self._shard(index).rename(self._partial / name)
        _write_json(self._partial / FEATURES, features_json(self._fields))
        if self._actions:
            statistics = dataset_statistics(np.concatenate(self._actions), np.concatenate(self._states), len(self))
            _write_json(self._partial / STATISTICS, {self.name: statistics})
        _write_json(self._partial / INFO, self._info())
        aside = self.folder.with_name(f".{VERSION}.old")
        shutil.rmtree(aside, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(aside)
        self._partial.rename(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written."""
        if self._file is not None:
            self._file.close()
            self._file = None
        shutil.rmtree(self._partial, ignore_errors=True)

    def _shard(self, index: int) -> Path:
        return self._partial / f"shard-{index:05d}"

    def _next_shard(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._shard(len(self._shard_lengths)).open("wb")
        self._shard_lengths.append(0)

    def _info(self) -> dict[str, object]:
        split = {
            "filepathTemplate": TEMPLATE,
            "name": "train",
            "numBytes": str(self._num_bytes),
            "shardLengths": [str(length) for length in self._shard_lengths],
        }
        return {
            "fileFormat": "tfrecord",
            "moduleName": "vlarl",
            "name": self.name,
            "releaseNotes": {VERSION: "Initial release."},
            "splits": [split],
            "version": VERSION,
        }


def episode_fields(episode: Demonstration) -> dict[str, Field]:
    """The fields of an episode's record."""
    flags = {f"{STEPS}{name}": Field("tensor", "bool") for name in ("is_first", "is_last", "is_terminal")}
    scalars = {f"{STEPS}{name}": Field("tensor", "float32") for name in ("reward", "discount")}
    shape = episode.images.shape[2:]
    cameras = {
        f"{OBSERVATION}{CAMERAS[view]}": Field("image", "uint8", shape) for view in range(episode.images.shape[1])
    }
    return {
        **flags,
        **scalars,
        **cameras,
        f"{OBSERVATION}state": Field("tensor", "float32", episode.proprio.shape[1:]),
        f"{STEPS}action": Field("tensor", "float32", episode.actions.shape[1:]),
        f"{STEPS}language_instruction": Field("text"),
        "episode_metadata/file_path": Field("text"),
    }


def episode_features(name: str, episode: Demonstration) -> dict[str, Feature]:
    """The values of an episode's record. A terminal last step means that the goal was reached."""
    length = len(episode.actions)
    last = np.arange(length) == length - 1
    cameras: dict[str, Feature] = {
        f"{OBSERVATION}{CAMERAS[view]}": [encode_jpeg(frame) for frame in episode.images[:, view]]
        for view in range(episode.images.shape[1])
    }
    return cameras | {
        f"{OBSERVATION}state": episode.proprio.astype(np.float32),
        f"{STEPS}action": recorded_actions(name, episode.actions).astype(np.float32),
        f"{STEPS}language_instruction": [episode.instruction.encode()] * length,
        f"{STEPS}is_first": (np.arange(length) == 0).astype(np.int64),
        f"{STEPS}is_last": last.astype(np.int64),
        f"{STEPS}is_terminal": (last & episode.success).astype(np.int64),
        f"{STEPS}reward": episode.rewards.astype(np.float32),
        f"{STEPS}discount": np.ones(length, np.float32),
        "episode_metadata/file_path": [episode.task.episode_id.encode()],
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
