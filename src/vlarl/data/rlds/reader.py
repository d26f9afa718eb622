"""RLDS datasets as TensorFlow Datasets lays them out, read without TensorFlow.

    folder/dataset_info.json   name, and how many episodes each shard holds
           features.json       every field with its type and shape ─► features.py
           NAME-train.tfrecord-00000-of-0000N   an episode is one record ─► tfrecord.py, tf_example.py

Everything is lazy: a shard is opened when one of its episodes is read, a field is decoded when it is read, and of a
camera only the requested frames, by a thread for each core. An episode is checked when it is opened: all fields of its
steps must have as many values as it has steps, and images the size in features.json; otherwise every later frame of a
dataset would silently be paired with another step's action. A dataset that is opened for some cameras checks the images
of those alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.config.dataset_folder import INFO, find_dataset
from vlarl.data.rlds.features import UNKNOWN, Field, parse_features
from vlarl.data.rlds.image_headers import ImageSizes, NotAnImageError
from vlarl.data.rlds.tf_example import Example, MalformedExampleError
from vlarl.data.rlds.tfrecord import FOOTER, HEADER, DamagedRecordError, TFRecordFile
from vlarl.errors import UsageError
from vlarl.images.jpeg import decode_image
from vlarl.json_files import read_json
from vlarl.observability.machine import available_cores
from vlarl.types import IntArray, UInt8Array

FEATURES = "features.json"
STEPS = "steps/"
FEW_FRAMES = 4  # are decoded in the calling thread, more of them by several threads
TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
PLACEHOLDER = re.compile(r"\{(\w+)\}")
MAX_NAME_BYTES = 255
SMALLEST_RECORD = HEADER + FOOTER  # bytes


@lru_cache(maxsize=1)
def _decoders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cores(), thread_name_prefix="decode")


class RldsDataset:
    """The episodes of one split, by index."""

    def __init__(self, path: str | Path, split: str = "train", cameras: Sequence[str] | None = None) -> None:
        """`path` is the folder of a version (NAME/1.0.0), or one above it with a single dataset in it.

        `cameras` are the image fields that will be read; None: any.
        """
        self._cameras = None if cameras is None else frozenset(cameras)
        self.folder = find_dataset(Path(path))
        info = _read_json(self.folder / INFO)
        self.name = str(info.get("name", self.folder.name))
        self.split = split
        self.fields = parse_features(_read_json(self.folder / FEATURES), self.folder / FEATURES)
        if not any(name.startswith(STEPS) for name in self.fields):
            raise UsageError(f"{self.folder / FEATURES} describes no steps, so that it is not an RLDS dataset's.")
        if info.get("fileFormat", "tfrecord") != "tfrecord":
            raise UsageError(f"{self.folder} is written as {info['fileFormat']}; only tfrecord can be read.")
        self.shard_lengths, self._template = self._described_shards(info)
        self._first_episodes = np.cumsum([0, *self.shard_lengths])
        self._shards: dict[int, TFRecordFile] = {}
        for index, length in enumerate(self.shard_lengths):
            path = self.shard_path(index)
            if not path.is_file():
                raise UsageError(f"{path} is missing: copy or download the dataset again.")
            if length * SMALLEST_RECORD > path.stat().st_size:
                raise UsageError(
                    f"{path} has {path.stat().st_size:,} bytes, and {INFO} says that it holds {length:,} episodes: "
                    "copy or download the dataset again."
                )
            if length == 0 and path.stat().st_size > 0:  # such a shard would never be opened
                raise UsageError(
                    f"{path} holds episodes, but {INFO} says that it has none: copy or download the dataset again."
                )
        if not len(self):
            raise UsageError(f"{self.folder} has no episodes in its split {split!r}: copy or download it again.")

    def _described_shards(self, info: dict[str, Any]) -> tuple[list[int], str]:
        """Episodes of each shard, and the template of the shards' names."""
        try:
            described = {str(one["name"]): one for one in info.get("splits", [])}
            if self.split not in described:
                known = ", ".join(described) or "none"
                raise UsageError(f"{self.folder} has no split {self.split!r}; it has {known}.")
            lengths = [int(length) for length in described[self.split].get("shardLengths", [])]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._bad_info(f"its splits can't be read, {type(error).__name__}: {error}") from error
        if any(length < 0 for length in lengths):
            raise self._bad_info("a shard has fewer than 0 episodes")
        return lengths, str(described[self.split].get("filepathTemplate") or TEMPLATE)

    def _bad_info(self, reason: str) -> UsageError:
        return UsageError(f"{self.folder / INFO} is malformed ({reason}): copy or download the dataset again.")

    def __len__(self) -> int:
        return int(self._first_episodes[-1])

    def __getitem__(self, index: int) -> Episode:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no episode {index}: {self.name} has {len(self)}")
        shard = int(np.searchsorted(self._first_episodes, index, side="right")) - 1
        record = index - int(self._first_episodes[shard])
        file = self._shard(shard)
        data = file.record(record)
        if file.damage is not None and record == self.shard_lengths[shard] - 1:  # what follows the last is damaged
            raise file.damage
        where = f"{file.path}, episode {record} at byte {file.offset(record):,}"
        return Episode(data, self.fields, where, file.checksum(record), self._cameras)

    def __iter__(self) -> Iterator[Episode]:
        return (self[index] for index in range(len(self)))

    def shard_path(self, index: int) -> Path:
        """The file of a shard."""
        total = len(self.shard_lengths)
        parts = {
            "DATASET": self.name,
            "SPLIT": self.split,
            "FILEFORMAT": "tfrecord",
            "SHARD_INDEX": f"{index:05d}",
            "NUM_SHARDS": f"{total:05d}",
            "SHARD_X_OF_Y": f"{index:05d}-of-{total:05d}",
        }
        # Not str.format, which would follow attributes and pad to any width that the template names.
        name = PLACEHOLDER.sub(lambda found: parts.get(found[1], found[0]), self._template)
        if "{" in name or Path(name).name != name or len(name.encode()) > MAX_NAME_BYTES:
            raise self._bad_info(
                f"its filepathTemplate {self._template[:80]!r} does not make a file name, with name {self.name[:80]!r}"
            )
        return self.folder / name

    def _shard(self, index: int) -> TFRecordFile:
        if index not in self._shards:
            file = TFRecordFile(self.shard_path(index))
            if file.damage is None and len(file) != self.shard_lengths[index]:
                raise UsageError(
                    f"{file.path} holds {len(file)} episodes, but {INFO} says {self.shard_lengths[index]}: copy or "
                    "download the dataset again."
                )
            self._shards[index] = file
        return self._shards[index]


class Episode:
    """One episode; its fields are decoded when they are read."""

    def __init__(
        self,
        record: memoryview,
        fields: dict[str, Field],
        where: str,
        checksum: int,
        cameras: frozenset[str] | None = None,
    ) -> None:
        self.checksum = checksum  # of its content, the same in any file
        self._where = where
        self._fields = fields
        try:
            self._example = Example(record)
            self.length = self._checked_length()
        except (MalformedExampleError, UnicodeDecodeError) as error:
            raise self.unreadable(error) from error
        for name, field in fields.items():
            if field.kind == "image" and name.startswith(STEPS) and (cameras is None or name in cameras):
                self._check_frames(name, field)

    def _checked_length(self) -> int:
        """The number of steps, which all fields of the steps must agree on."""
        counts: dict[str, int] = {}
        for name, field in self._fields.items():
            if not name.startswith(STEPS) or field.kind == "other":
                continue
            if (each := 1 if field.kind == "image" else field.num_values) is not None:
                steps, rest = divmod(self._example.count(name), each)
                if rest:
                    raise MalformedExampleError(
                        f"{name} has {steps * each + rest} values, which is not a multiple of {each}"
                    )
                counts[name] = steps
        usual = Counter(counts.values()).most_common(1)[0][0] if counts else 0
        for name, steps in counts.items():
            if steps != usual:
                raise MalformedExampleError(f"{name} has {steps} steps, and the other fields have {usual}")
        if usual == 0:
            raise MalformedExampleError("it has no steps")
        return usual

    def _check_frames(self, name: str, field: Field) -> None:
        """Refuse frames whose size is not that of the field, before any of them is decoded."""
        wanted, sizes = field.shape[:2], ImageSizes()
        for index, frame in enumerate(self._encoded(name)):
            try:
                size = sizes.of(frame)
            except NotAnImageError as error:
                raise self.unreadable(f"the image of step {index} in {name} {error}") from error
            if len(wanted) == 2 and any(one not in (UNKNOWN, other) for one, other in zip(wanted, size, strict=True)):
                said = f"{wanted[0]} x {wanted[1]} in {FEATURES}"
                raise self.unreadable(
                    f"the image of step {index} in {name} has {size[0]} x {size[1]} pixels, and {said}"
                )

    def __len__(self) -> int:
        return self.length

    @property
    def steps(self) -> Sequence[Step]:
        """Its steps, each of which reads only its own values."""
        return [Step(self, index) for index in range(self.length)]

    def values(self, name: str) -> NDArray[Any]:
        """The values of a tensor field: [T, …] for a field of the steps, […] for one of the episode."""
        field = self._field(name, "tensor")
        try:
            flat = self._example.floats(name) if field.is_float else self._example.integers(name)
            values: NDArray[Any] = flat.astype(field.dtype, copy=False).reshape(self._shape(name, field))
        except ValueError as error:
            raise self.unreadable(f"{name}: {error}") from error
        if field.is_float and not np.isfinite(values).all():
            where = f" in step {np.argwhere(~np.isfinite(values))[0][0]}" if name.startswith(STEPS) else ""
            raise self.unreadable(f"{name} holds NaN or infinity{where}")
        return values

    def texts(self, name: str) -> list[str]:
        """A field's texts, one for each step; a field of the episode has one."""
        self._field(name, "text")
        try:
            return [text.decode() for text in self._example.texts(name)]
        except (MalformedExampleError, UnicodeDecodeError) as error:
            raise self.unreadable(f"{name}: {error}") from error

    def images(self, name: str, steps: Sequence[int] | IntArray | None = None) -> UInt8Array:
        """[n, H, W, 3] the frames of a camera at the given steps, at all by default; decodes only those."""
        self._field(name, "image")
        encoded = self._encoded(name)
        wanted = range(len(encoded)) if steps is None else [int(step) for step in steps]
        try:
            frames = _decoded([encoded[index] for index in wanted])
            return np.stack(frames) if frames else np.zeros((0, 0, 0, 3), np.uint8)
        except Exception as error:  # noqa: BLE001 - what Pillow raises for damaged images is not documented
            raise self.unreadable(f"an image in {name}: {error}") from error

    def blobs(self, name: str) -> list[bytes]:
        """The bytes of a text field, one for each step: for fields that hold something else than text."""
        self._field(name, "text")
        try:
            return self._example.texts(name)
        except MalformedExampleError as error:
            raise self.unreadable(f"{name}: {error}") from error

    def _encoded(self, name: str) -> list[memoryview]:
        try:
            return self._example.views(name)
        except MalformedExampleError as error:
            raise self.unreadable(f"{name}: {error}") from error

    def _shape(self, name: str, field: Field) -> tuple[int, ...]:
        return (-1, *field.shape) if name.startswith(STEPS) else field.shape

    def _field(self, name: str, kind: str) -> Field:
        field = self._fields.get(name)
        if field is None or field.kind != kind:
            fitting = [known for known, one in self._fields.items() if one.kind == kind]
            raise UsageError(f"{self._where}: there is no {kind} field {name!r}; there are {', '.join(fitting)}.")
        return field

    def unreadable(self, reason: object) -> DamagedRecordError:
        """The error for this episode; it names the file and the byte."""
        return DamagedRecordError(f"{self._where} can't be read ({reason}): copy or download the dataset again.")


def _decoded(encoded: Sequence[memoryview]) -> list[UInt8Array]:
    """All images, by a thread for each core: each takes one run of them, as a call for each image costs as much as a
    small image."""
    if len(encoded) < FEW_FRAMES:
        return _decode_all(encoded)
    size = -(-len(encoded) // available_cores())
    starts = range(size, len(encoded), size)
    others = [_decoders().submit(_decode_all, encoded[start : start + size]) for start in starts]
    frames = _decode_all(encoded[:size])  # the calling thread decodes, too
    for other in others:
        frames += other.result()
    return frames


def _decode_all(encoded: Sequence[memoryview]) -> list[UInt8Array]:
    return [decode_image(image) for image in encoded]


class Step:
    """One step of an episode."""

    def __init__(self, episode: Episode, index: int) -> None:
        self._episode, self._index = episode, index

    def values(self, name: str) -> NDArray[Any]:
        """This step's values of a tensor field."""
        step: NDArray[Any] = self._episode.values(STEPS + name)[self._index]
        return step

    def text(self, name: str = "language_instruction") -> str:
        """This step's text of a field."""
        return self._episode.texts(STEPS + name)[self._index]

    def image(self, camera: str) -> UInt8Array:
        """[H, W, 3] a camera's frame at this step; decodes only this frame."""
        frame: UInt8Array = self._episode.images(f"{STEPS}observation/{camera}", [self._index])[0]
        return frame


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}): copy or download the dataset again.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}): copy or download the dataset again.") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} does not hold a JSON object: copy or download the dataset again.")
    return content
