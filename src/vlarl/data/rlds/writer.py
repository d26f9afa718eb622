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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from vlarl.config.dataset_folder import INFO
from vlarl.data.conventions import policy_actions, recorded_actions
from vlarl.data.parts import Part, link_or_copy, read_parts, swap, write_parts
from vlarl.data.rlds.features import Field, features_json
from vlarl.data.rlds.reader import FEATURES, STEPS, TEMPLATE, RldsDataset
from vlarl.data.rlds.tf_example import Feature, encode_example
from vlarl.data.rlds.tfrecord import FOOTER, HEADER, write_record
from vlarl.data.statistics import dataset_statistics
from vlarl.envs.base import Demonstration
from vlarl.errors import UsageError
from vlarl.images.jpeg import encode_jpeg
from vlarl.observability.machine import available_cores
from vlarl.types import FloatArray

VERSION = "1.0.0"
STATISTICS = "dataset_statistics.json"
CAMERAS = ("image", "wrist_image")  # the first of an observation's views, in their order
OBSERVATION = f"{STEPS}observation/"
SHARD_BYTES = 128 * 2**20


@dataclass(frozen=True)
class EncodedEpisode:
    """An episode as its record holds it, much smaller than its frames."""

    fields: dict[str, Field]
    record: bytes
    actions: FloatArray | None = None  # as a policy gives them; with states, for statistics
    states: FloatArray | None = None

    @classmethod
    def of(cls, name: str, episode: Demonstration) -> EncodedEpisode:
        """An episode of the dataset with this name."""
        record = encode_example(episode_features(name, episode))
        return cls(episode_fields(episode), record, episode.actions, episode.proprio)


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
        self._parts: list[Part] = []
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
        self.add_encoded(EncodedEpisode.of(self.name, episode))

    def add_values(
        self,
        fields: dict[str, Field],
        values: Mapping[str, Feature],
        actions: np.ndarray | None = None,
        states: np.ndarray | None = None,
    ) -> None:
        """Write one episode of any fields; with actions in a policy's convention and states, statistics are written."""
        self.add_encoded(EncodedEpisode(fields, encode_example(values), actions, states))

    def add_encoded(self, episode: EncodedEpisode) -> None:
        """Write one episode."""
        if self._fields and episode.fields != self._fields:
            raise ValueError(f"episodes of one dataset have the same fields: {episode.fields} after {self._fields}")
        self._fields = episode.fields
        if self._file is None or self._file.tell() + len(episode.record) > self._shard_bytes:
            self._next_shard()
        assert self._file is not None
        write_record(self._file, episode.record)
        self._shard_lengths[-1] += 1
        self._num_bytes += len(episode.record)
        if episode.actions is not None and episode.states is not None:
            self._actions.append(episode.actions)
            self._states.append(episode.states)

    def end_part(self, iteration: int) -> None:
        """Note that the episodes of a training iteration are complete: the next ones go into another shard."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._parts.append(Part(iteration, len(self._shard_lengths), len(self)))

    def grow(self) -> None:
        """Continue a dataset that is finished: the next `finish` replaces it by one with further episodes."""
        self._partial.mkdir(parents=True)
        for index in range(len(self._shard_lengths)):
            link_or_copy(self.folder / self._shard_name(index), self._shard(index))

    @classmethod
    def reopened(cls, root: str | Path, name: str, part: Part) -> RldsWriter:
        """The writer of a finished dataset with its parts up to this one, to grow it."""
        writer = cls(root, name, overwrite=True)
        dataset = RldsDataset(writer.folder)
        writer._fields = dataset.fields
        for index in range(part.files):
            path = dataset.shard_path(index)
            link_or_copy(path, writer._shard(index))
            length = dataset.shard_lengths[index]
            writer._shard_lengths.append(length)
            writer._num_bytes += path.stat().st_size - length * (HEADER + FOOTER)
        for index in range(part.episodes):
            episode = dataset[index]
            writer._actions.append(policy_actions(name, episode.values(f"{STEPS}action")))
            writer._states.append(episode.values(f"{OBSERVATION}state"))
        writer._parts = [each for each in read_parts(writer.folder) if each.iteration <= part.iteration]
        return writer

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
        for index in range(len(self._shard_lengths)):
            self._shard(index).rename(self._partial / self._shard_name(index))
        _write_json(self._partial / FEATURES, features_json(self._fields))
        if self._actions:
            statistics = dataset_statistics(np.concatenate(self._actions), np.concatenate(self._states), len(self))
            _write_json(self._partial / STATISTICS, {self.name: statistics})
        write_parts(self._partial, self._parts)
        _write_json(self._partial / INFO, self._info())
        swap(self._partial, self.folder)

    def discard(self) -> None:
        """Remove what was written."""
        if self._file is not None:
            self._file.close()
            self._file = None
        shutil.rmtree(self._partial, ignore_errors=True)

    def _shard_name(self, index: int) -> str:
        """The name of a shard when all are there."""
        shard = f"{index:05d}-of-{len(self._shard_lengths):05d}"
        return TEMPLATE.format(DATASET=self.name, SPLIT="train", FILEFORMAT="tfrecord", SHARD_X_OF_Y=shard)

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


def camera(view: int) -> str:
    """The name of a view, by its index in an observation."""
    return CAMERAS[view] if view < len(CAMERAS) else f"view_{view}"


def episode_fields(episode: Demonstration) -> dict[str, Field]:
    """The fields of an episode's record."""
    flags = {f"{STEPS}{name}": Field("tensor", "bool") for name in ("is_first", "is_last", "is_terminal")}
    scalars = {f"{STEPS}{name}": Field("tensor", "float32") for name in ("reward", "discount")}
    shape = episode.images.shape[2:]
    cameras = {
        f"{OBSERVATION}{camera(view)}": Field("image", "uint8", shape) for view in range(episode.images.shape[1])
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
    with ThreadPoolExecutor(available_cores()) as pool:
        cameras: dict[str, Feature] = {
            f"{OBSERVATION}{camera(view)}": list(pool.map(encode_jpeg, episode.images[:, view]))
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
