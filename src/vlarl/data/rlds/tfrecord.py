"""TFRecord files without TensorFlow: records one after the other, each with its length and two checksums.

    length uint64 | checksum of the length uint32 | data | checksum of the data uint32        (little-endian)

A checksum is a CRC-32C, rotated and shifted as TensorFlow masks it. Lengths are checked when a file is indexed, data
when a record is read.
"""

from __future__ import annotations

import mmap
import struct
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from vlarl.errors import UsageError

UInt32Array = NDArray[np.uint32]

POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
MASK_DELTA = 0xA282EAD8
BLOCK = 512  # bytes whose checksums are computed together
HEADER, FOOTER = 12, 4


def crc32c(data: bytes | memoryview) -> int:
    """The CRC-32C of some bytes.

    A CRC is linear: each byte adds a table's entry for its value and its position. A block's bytes are looked up all at
    once, and blocks are joined by shifting the checksum so far past the next block.
    """
    values = np.frombuffer(data, np.uint8)
    whole = len(values) // BLOCK * BLOCK
    positions, shift = _block_tables()
    crc = 0xFFFFFFFF
    if whole:
        rows = 256 * np.arange(BLOCK, dtype=np.int32)
        found = positions.take(rows + values[:whole].reshape(-1, BLOCK))
        one, two, three, four = shift
        for block in np.bitwise_xor.reduce(found, axis=1).tolist():
            crc = one[crc & 255] ^ two[crc >> 8 & 255] ^ three[crc >> 16 & 255] ^ four[crc >> 24] ^ block
    table = _byte_list()
    for value in values[whole:].tolist():
        crc = table[(crc ^ value) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked_crc(data: bytes | memoryview) -> int:
    """The checksum as TFRecord stores it."""
    crc = crc32c(data)
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


@lru_cache(maxsize=1)
def _byte_table() -> UInt32Array:
    """[256] the CRC of each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(POLYNOMIAL), table >> 1)
    return table


@lru_cache(maxsize=1)
def _byte_list() -> list[int]:
    table: list[int] = _byte_table().tolist()
    return table


@lru_cache(maxsize=1)
def _block_tables() -> tuple[UInt32Array, tuple[list[int], list[int], list[int], list[int]]]:
    """[BLOCK * 256] what each byte value adds to a block's checksum at each position; and for each of the four bytes of
    a checksum, its value after a block of zeros."""
    table = _byte_table()
    row = table  # of the last byte; one position earlier means one more zero byte after it
    rows = [row]
    for _ in range(BLOCK - 1):
        row = table[row & 255] ^ row >> 8
        rows.append(row)
    # A checksum is added to the first four bytes of the next block.
    one, two, three, four = (rows[BLOCK - 1 - position].tolist() for position in range(4))
    return np.concatenate(rows[::-1]), (one, two, three, four)
