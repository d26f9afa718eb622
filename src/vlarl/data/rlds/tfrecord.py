"""TFRecord files without TensorFlow: records one after the other, each with its length and two checksums.

    length uint64 | checksum of the length uint32 | data | checksum of the data uint32        (little-endian)

A checksum is a CRC-32C, rotated and shifted as TensorFlow masks it. Lengths are checked when a file is indexed, data
when a record is read. Where a length is damaged, the records before it can still be read.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from vlarl.errors import UsageError


class DamagedRecordError(UsageError):
    """A record that can't be read; its message names the file and the byte."""


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
        self._spans: list[tuple[int, int]] = []  # the start and the length of each record's data
        self.damage = self._index()  # where the file can't be followed any further
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return len(self._spans)

    def offset(self, index: int) -> int:
        """The byte at which a record begins."""
        return self._spans[index][0] - HEADER

    def checksum(self, index: int) -> int:
        """The checksum that the file has for a record's data."""
        begin, length = self._spans[index]
        crc: int = struct.unpack_from("<I", self._content, begin + length)[0]
        return crc

    def record(self, index: int) -> memoryview:
        """The data of a record, checked the first time."""
        if self.damage is not None and index >= len(self._spans):
            raise self.damage
        begin, length = self._spans[index]
        data = self._content[begin : begin + length]
        if index not in self._checked:
            if masked_crc(data) != self.checksum(index):
                raise self._damaged(index, begin - HEADER, "its checksum is wrong")
            self._checked.add(index)
        return data

    def _index(self) -> DamagedRecordError | None:
        """Find the records, up to the first whose length can't be trusted: those after it can't be found either."""
        position, size = 0, len(self._content)
        while position < size:
            index = len(self._spans)
            if position + HEADER > size:
                return self._damaged(index, position, "the file ends within its header")
            length, crc = struct.unpack_from("<QI", self._content, position)
            if crc != masked_crc(self._content[position : position + 8]):
                return self._damaged(index, position, "the checksum of its length is wrong")
            end = position + HEADER + length + FOOTER
            if end > size:
                return self._damaged(index, position, f"the file ends {end - size:,} bytes too early")
            self._spans.append((position + HEADER, length))
            position = end
        return None

    def _damaged(self, index: int, position: int, reason: str) -> DamagedRecordError:
        return DamagedRecordError(
            f"{self.path}: record {index} at byte {position:,} is damaged ({reason}): copy or download the file again."
        )
