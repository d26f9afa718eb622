"""RLDS datasets as TensorFlow Datasets lays them out, read without TensorFlow.

    folder/dataset_info.json   name, and how many episodes each shard holds
           features.json       every field with its type and shape ─► features.py
           NAME-train.tfrecord-00000-of-0000N   an episode is one record ─► tfrecord.py, tf_example.py

Everything is lazy: a shard is opened when an episode of it is asked for, a field is decoded when it is read, and of a
camera only the frames that are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.data.features import Field, parse_features
from vlarl.data.tf_example import Example, MalformedExampleError
from vlarl.data.tfrecord import TFRecordFile
from vlarl.errors import UsageError
from vlarl.observability.machine import available_cores
from vlarl.policies.openvla.jpeg import decode_image
from vlarl.types import IntArray, UInt8Array

INFO, FEATURES = "dataset_info.json", "features.json"
STEPS = "steps/"
FEW_FRAMES = 4  # are decoded here and now, more of them in several threads
TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"


@lru_cache(maxsize=1)
def _decoders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cores(), thread_name_prefix="decode")


class RldsDataset:
    """The episodes of one split, by number."""

    def __init__(self, path: str | Path, split: str = "train") -> None:
        """`path` is the folder of a version (NAME/1.0.0), or one above it with a single dataset in it."""
        self.folder = find_dataset(Path(path))
        info = _read_json(self.folder / INFO)
        self.name = str(info.get("name", self.folder.name))
        self.split = split
        self.fields = parse_features(_read_json(self.folder / FEATURES), self.folder / FEATURES)
        if info.get("fileFormat", "tfrecord") != "tfrecord":
            raise UsageError(f"{self.folder} is written as {info['fileFormat']}; only tfrecord can be read.")
        described = {str(one.get("name")): one for one in info.get("splits", [])}
        if split not in described:
            raise UsageError(f"{self.folder} has no split {split!r}; it has {', '.join(described) or 'none'}.")
        self.shard_lengths = [int(length) for length in described[split].get("shardLengths", [])]
        self._first_episodes = np.cumsum([0, *self.shard_lengths])
        self._template = str(described[split].get("filepathTemplate") or TEMPLATE)
        self._shards: dict[int, TFRecordFile] = {}
        for number in range(len(self.shard_lengths)):
            if not self.shard_path(number).is_file():
                raise UsageError(f"{self.shard_path(number)} is missing: copy or download the dataset again.")

    def __len__(self) -> int:
        return int(self._first_episodes[-1])

    def __getitem__(self, number: int) -> Episode:
        if not 0 <= number < len(self):
            raise IndexError(f"there is no episode {number}: {self.name} has {len(self)}")
        shard = int(np.searchsorted(self._first_episodes, number, side="right")) - 1
        place = number - int(self._first_episodes[shard])
        file = self._shard(shard)
        return Episode(file.record(place), self.fields, f"{file.path}, episode {place}")

    def __iter__(self) -> Iterator[Episode]:
        return (self[number] for number in range(len(self)))

    def shard_path(self, number: int) -> Path:
        """The file of a shard."""
        name = self._template.format(
            DATASET=self.name,
            SPLIT=self.split,
            FILEFORMAT="tfrecord",
            SHARD_X_OF_Y=f"{number:05d}-of-{len(self.shard_lengths):05d}",
        )
        return self.folder / name

    def _shard(self, number: int) -> TFRecordFile:
        if number not in self._shards:
            file = TFRecordFile(self.shard_path(number))
            if len(file) != self.shard_lengths[number]:
                raise UsageError(
                    f"{file.path} holds {len(file)} episodes, but {INFO} says {self.shard_lengths[number]}: copy or "
                    "download the dataset again."
                )
            self._shards[number] = file
        return self._shards[number]


class Episode:
    """One episode; its fields are decoded when they are read."""

    def __init__(self, record: memoryview, fields: dict[str, Field], where: str) -> None:
        self._where = where
        self._fields = fields
        try:
            self._example = Example(record)
        except (MalformedExampleError, UnicodeDecodeError) as error:
            raise self._unreadable(error) from error

    @cached_property
    def length(self) -> int:
        """The number of steps."""
        name = next(name for name, field in self._fields.items() if name.startswith(STEPS) and field.kind != "image")
        return len(self.texts(name)) if self._fields[name].kind == "text" else len(self.numbers(name))

    def __len__(self) -> int:
        return self.length

    @property
    def steps(self) -> Sequence[Step]:
        """Its steps, each of which reads its own part and nothing else."""
        return [Step(self, index) for index in range(self.length)]

    def numbers(self, name: str) -> NDArray[Any]:
        """A field's numbers: [T, …] of a field of the steps, […] of one of the episode."""
        field = self._field(name, "tensor")
        try:
            flat = self._example.floats(name) if field.is_float else self._example.integers(name)
            return flat.astype(field.dtype, copy=False).reshape(self._shape(name, field))
        except (MalformedExampleError, KeyError, ValueError) as error:
            raise self._unreadable(error) from error

    def texts(self, name: str) -> list[str]:
        """A field's texts, one for each step; a field of the episode has one."""
        self._field(name, "text")
        try:
            return [text.decode() for text in self._example.texts(name)]
        except (MalformedExampleError, KeyError, UnicodeDecodeError) as error:
            raise self._unreadable(error) from error

    def images(self, name: str, steps: Sequence[int] | IntArray | None = None) -> UInt8Array:
        """[n, H, W, 3] the frames of a camera at the given steps, at all by default; decodes those alone."""
        self._field(name, "image")
        encoded = self._encoded(name)
        wanted = range(len(encoded)) if steps is None else steps
        each = map if len(wanted) < FEW_FRAMES else _decoders().map
        try:
            frames = list(each(lambda index: decode_image(bytes(encoded[index])), wanted))
        except (OSError, IndexError, SyntaxError) as error:  # Pillow's for damaged pictures
            raise self._unreadable(error) from error
        return np.stack(frames) if frames else np.zeros((0, 0, 0, 3), np.uint8)

    def _encoded(self, name: str) -> list[memoryview]:
        if name not in self._views:
            try:
                self._views[name] = self._example.views(name)
            except (MalformedExampleError, KeyError) as error:
                raise self._unreadable(error) from error
        return self._views[name]

    @cached_property
    def _views(self) -> dict[str, list[memoryview]]:
        return {}

    def _shape(self, name: str, field: Field) -> tuple[int, ...]:
        return (-1, *field.shape) if name.startswith(STEPS) else field.shape

    def _field(self, name: str, kind: str) -> Field:
        field = self._fields.get(name)
        if field is None or field.kind != kind:
            fitting = [known for known, one in self._fields.items() if one.kind == kind]
            raise UsageError(f"{self._where}: there is no {kind} field {name!r}; there are {', '.join(fitting)}.")
        return field

    def _unreadable(self, error: Exception) -> UsageError:
        return UsageError(f"{self._where} can't be read ({error}): copy or download the dataset again.")


class Step:
    """One step of an episode."""

    def __init__(self, episode: Episode, index: int) -> None:
        self._episode, self._index = episode, index

    def numbers(self, name: str) -> NDArray[Any]:
        """This step's numbers of a field."""
        step: NDArray[Any] = self._episode.numbers(STEPS + name)[self._index]
        return step

    def text(self, name: str = "language_instruction") -> str:
        """This step's text of a field."""
        return self._episode.texts(STEPS + name)[self._index]

    def image(self, camera: str) -> UInt8Array:
        """[H, W, 3] what a camera sees at this step; decodes this frame alone."""
        frame: UInt8Array = self._episode.images(f"{STEPS}observation/{camera}", [self._index])[0]
        return frame


def find_dataset(path: Path) -> Path:
    """The folder with dataset_info.json: the path itself, or the only one at most two levels below it."""
    if not path.is_dir():
        raise UsageError(f"{path} is no folder: name the folder of an RLDS dataset, such as data/NAME/1.0.0.")
    found = (
        [path]
        if (path / INFO).is_file()
        else sorted(p.parent for p in [*path.glob(f"*/{INFO}"), *path.glob(f"*/*/{INFO}")])
    )
    if not found:
        raise UsageError(f"{path} holds no RLDS dataset: there is no {INFO} in it or below it.")
    if len(found) > 1:
        raise UsageError(f"{path} holds several datasets; name one of {', '.join(map(str, found))}.")
    return found[0]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}): copy or download the dataset again.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}): copy or download the dataset again.") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no JSON object: copy or download the dataset again.")
    return content
