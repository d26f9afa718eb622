"""A LeRobot dataset as mappings read it: its features are fields of the steps."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.data.lerobot.info import TASK
from vlarl.data.lerobot.reader import LeRobotDataset, LeRobotEpisode
from vlarl.data.rlds.features import Field
from vlarl.data.rlds.reader import STEPS
from vlarl.errors import UsageError
from vlarl.types import IntArray, UInt8Array


class MappedDataset:
    """The episodes of a LeRobot dataset; counters are not among the fields."""

    def __init__(self, dataset: LeRobotDataset) -> None:
        self._dataset = dataset
        self.name, self.folder = dataset.name, dataset.folder
        self.fields: dict[str, Field] = {
            STEPS + name: dataset.fields[name] for name in (*dataset.info.own_features, TASK)
        }

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> MappedEpisode:
        return MappedEpisode(self._dataset[index], self.fields)

    def __iter__(self) -> Iterator[MappedEpisode]:
        return (self[index] for index in range(len(self)))


class MappedEpisode:
    """One episode by the names of its fields."""

    def __init__(self, episode: LeRobotEpisode, fields: dict[str, Field]) -> None:
        self._episode, self._fields = episode, fields

    def __len__(self) -> int:
        return len(self._episode)

    @property
    def checksum(self) -> int:
        """Of its values and texts, without counters: the same wherever the episode is in a dataset."""
        checksum = 0
        for name in sorted(self._fields):
            kind = self._fields[name].kind
            if kind == "tensor":
                checksum = zlib.crc32(np.ascontiguousarray(self.values(name)).tobytes(), checksum)
            elif kind == "text":
                checksum = zlib.crc32("\0".join(self.texts(name)).encode(), checksum)
        return checksum

    def values(self, name: str) -> NDArray[Any]:
        """[T, …] the values of a field."""
        return self._episode.values(name.removeprefix(STEPS))

    def texts(self, name: str) -> list[str]:
        """A text field's value at each step."""
        return self._episode.texts(name.removeprefix(STEPS))

    def images(self, name: str, steps: Sequence[int] | IntArray | None = None) -> UInt8Array:
        """[n, H, W, 3] the frames of a camera at the given steps, at all by default."""
        return self._episode.images(name.removeprefix(STEPS), steps)

    def blobs(self, name: str) -> list[bytes]:
        """The bytes of a text field; compressed values are none that a LeRobot dataset can hold as text."""
        raise self.unreadable(f"{name.removeprefix(STEPS)} holds texts, and unzip reads bytes")

    def unreadable(self, reason: object) -> UsageError:
        """The error for this episode."""
        return self._episode.unreadable(reason)
