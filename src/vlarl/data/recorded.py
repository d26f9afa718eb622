"""What all recorded datasets have in common, whatever their files: RLDS (rlds/) and LeRobot (lerobot/)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from vlarl.data.rlds.features import Field
from vlarl.errors import UsageError
from vlarl.types import IntArray, UInt8Array


@dataclass(frozen=True)
class Roles:
    """Which fields of a dataset a policy reads and imitates; None where the dataset has no such field."""

    views: tuple[str, ...]  # the agent's view first
    state: str | None
    action: str | None
    instruction: str | None


class RecordedEpisode(Protocol):
    """One episode; its fields are decoded when they are read."""

    def __len__(self) -> int:
        """The number of steps."""
        ...

    def values(self, name: str) -> NDArray[Any]:
        """[T, …] the values of a tensor field."""
        ...

    def texts(self, name: str) -> list[str]:
        """A text field's value at each step."""
        ...

    def images(self, name: str, steps: Sequence[int] | IntArray | None = None) -> UInt8Array:
        """[n, H, W, 3] the frames of a camera at the given steps, at all by default."""
        ...


class MappableEpisode(RecordedEpisode, Protocol):
    """An episode that a mapping reads; its fields have the names of RLDS, `steps/…`."""

    @property
    def checksum(self) -> int:
        """Of its content, the same in any file."""
        ...

    def blobs(self, name: str) -> list[bytes]:
        """The bytes of a text field, one for each step."""
        ...

    def unreadable(self, reason: object) -> UsageError:
        """The error for this episode; it names the file."""
        ...


class MappableDataset(Protocol):
    """The episodes of a dataset, by index, for a mapping."""

    name: str
    folder: Path
    fields: dict[str, Field]

    def __len__(self) -> int:
        """The number of episodes."""
        ...

    def __getitem__(self, index: int) -> MappableEpisode: ...


class RecordedDataset(Protocol):
    """The episodes of a dataset, by index."""

    name: str
    folder: Path

    @property
    def fields(self) -> Mapping[str, Field]:
        """Every field by its name."""
        ...

    def __len__(self) -> int:
        """The number of episodes."""
        ...

    def __getitem__(self, index: int) -> RecordedEpisode: ...

    def __iter__(self) -> Iterator[RecordedEpisode]: ...
