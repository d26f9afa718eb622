"""TFRecord files without TensorFlow: records one after the other, each with its length and two checksums.

    length uint64 | checksum of the length uint32 | data | checksum of the data uint32        (little-endian)

A checksum is a CRC-32C, rotated and shifted as TensorFlow masks it. Lengths are checked when a file is indexed, data
when a record is read.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from vlarl.errors import UsageError

MASK_DELTA = 0xA282EAD8
HEADER, FOOTER = 12, 4


def masked_crc(data: bytes | memoryview) -> int:
    """The checksum as TFRecord stores it."""
    crc: int = google_crc32c.value(bytes(data))
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF


def write_record(file: BinaryIO, data: bytes) -> None:
    """Append one record."""
    length = struct.pack("<Q", len(data))
    file.write(length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data)))


class TFRecordFile:
    """One shard, mapped into memory; data is read on access."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                self._content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")
        except OSError as error:
            raise UsageError(f"{path} can't be read ({error.strerror}): check that the file is there.") from error
        self._spans = self._index()
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return len(self._spans)

    def record(self, index: int) -> memoryview:
        """The data of a record, checked the first time."""
        begin, length = self._spans[index]
        data = self._content[begin : begin + length]
        if index not in self._checked:
            if masked_crc(data) != struct.unpack_from("<I", self._content, begin + length)[0]:
                raise self._damaged(index, begin - HEADER, "its checksum is wrong")
            self._checked.add(index)
        return data

    def _index(self) -> list[tuple[int, int]]:
        """The start and the length of each record's data."""
        spans: list[tuple[int, int]] = []
        position, size = 0, len(self._content)
        while position < size:
            if position + HEADER > size:
                raise self._damaged(len(spans), position, "the file ends within its header")
            length, crc = struct.unpack_from("<QI", self._content, position)
            if crc != masked_crc(self._content[position : position + 8]):
                raise self._damaged(len(spans), position, "the checksum of its length is wrong")
            end = position + HEADER + length + FOOTER
            if end > size:
                raise self._damaged(len(spans), position, f"the file ends {end - size:,} bytes too early")
            spans.append((position + HEADER, length))
            position = end
        return spans

    def _damaged(self, index: int, position: int, reason: str) -> UsageError:
        return UsageError(
            f"{self.path}: record {index} at byte {position:,} is damaged ({reason}): copy or download the file again."
        )
