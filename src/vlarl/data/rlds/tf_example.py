"""tf.train.Example without protobuf: named lists of bytes, floats or integers.

    Example   1: Features        Features  1: entry (1: name, 2: Feature), many
    Feature   1: BytesList  2: FloatList  3: Int64List        each list  1: values

A feature is found by its name and decoded on access. Values may be packed, as this module always writes them, or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vlarl.types import FloatArray, IntArray

Feature = Sequence[bytes] | NDArray[np.generic]  # bytes, float32 or int64 values

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3


class MalformedExampleError(ValueError):
    """Bytes that are not a tf.train.Example."""


class Example:
    """The features of one example, by name."""

    def __init__(self, data: memoryview | bytes) -> None:
        self._features: dict[str, memoryview] = {}
        self._lists: dict[str, list[memoryview]] = {}  # lists of bytes that were read already
        for field, features in _fields(memoryview(data)):
            if field == 1 and isinstance(features, memoryview):
                self._features |= dict(_entry(entry) for key, entry in _fields(features) if key == 1)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its features, sorted."""
        return tuple(sorted(self._features))

    def texts(self, name: str) -> list[bytes]:
        """The values of a list of bytes."""
        return [bytes(value) for value in self.views(name)]

    def views(self, name: str) -> list[memoryview]:
        """The values of a list of bytes, none of them copied."""
        if name not in self._lists:
            values = self._values(name, BYTES_LIST)
            self._lists[name] = [value for key, value in _fields(values) if key == 1 and isinstance(value, memoryview)]
        return self._lists[name]

    def floats(self, name: str) -> FloatArray:
        """The values of a list of floats."""
        parts = [_float_values(value) for field, value in _fields(self._values(name, FLOAT_LIST)) if field == 1]
        return np.concatenate([np.zeros(0, np.float32), *parts])

    def integers(self, name: str) -> IntArray:
        """The values of a list of integers."""
        parts = [_integer_values(value) for field, value in _fields(self._values(name, INT64_LIST)) if field == 1]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def count(self, name: str) -> int:
        """How many values a feature has; nothing is decoded."""
        kind = self.kind(name)
        if kind is None:
            return 0
        if kind == BYTES_LIST:
            return len(self.views(name))
        parts = [part for field, part in _fields(self._values(name, kind)) if field == 1]
        if kind == FLOAT_LIST:
            return sum(len(_float_values(part)) for part in parts)
        # An integer ends with its only byte below 128.
        return sum(1 if isinstance(part, int) else int((np.frombuffer(part, np.uint8) < 128).sum()) for part in parts)

    def kind(self, name: str) -> int | None:
        """The field number of a feature's list: BYTES_LIST, FLOAT_LIST or INT64_LIST; None for one without values."""
        return next((field for field, _ in _fields(self._feature(name))), None)

    def _feature(self, name: str) -> memoryview:
        if name not in self._features:
            raise MalformedExampleError(f"it has no field {name!r}; it has {', '.join(self.names)}")
        return self._features[name]

    def _values(self, name: str, kind: int) -> memoryview:
        for field, values in _fields(self._feature(name)):
            if field == kind and isinstance(values, memoryview):
                return values
        if self.kind(name) is not None:
            raise MalformedExampleError(f"the feature {name!r} holds values of another kind")
        return memoryview(b"")


def encode_example(features: Mapping[str, Feature]) -> bytes:
    """The bytes of an example; names are sorted, so that equal features are equal bytes."""
    entries = []
    for name, values in sorted(features.items()):
        entry = _delimited(1, name.encode()) + _delimited(2, _encode_feature(values))
        entries.append(_delimited(1, entry))
    return _delimited(1, b"".join(entries))


def _encode_feature(values: Feature) -> bytes:
    if not isinstance(values, np.ndarray):
        return _delimited(BYTES_LIST, b"".join(_delimited(1, value) for value in values))
    if values.dtype == np.float32:
        return _delimited(FLOAT_LIST, _delimited(1, values.astype("<f4").tobytes()))
    if values.dtype == np.int64:
        return _delimited(INT64_LIST, _delimited(1, b"".join(_varint(value) for value in values.ravel().tolist())))
    raise TypeError(f"a feature holds bytes, float32 or int64, not {values.dtype}: convert it first")


def _entry(data: int | memoryview) -> tuple[str, memoryview]:
    if not isinstance(data, memoryview):
        raise MalformedExampleError("a feature's entry is a number")
    fields = dict(_fields(data))
    name, feature = fields.get(1, memoryview(b"")), fields.get(2, memoryview(b""))
    if not isinstance(name, memoryview) or not isinstance(feature, memoryview):
        raise MalformedExampleError("a feature's name or content is a number")
    return str(name, "utf-8"), feature


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a protobuf message: the field number of each, and an integer or bytes."""
    position, size = 0, len(data)
    while position < size:
        key = data[position]
        if key < 128:  # most keys have one byte
            position += 1
        else:
            key, position = _read_varint(data, position)
        wire = key & 7
        if wire == VARINT:
            value, position = _read_varint(data, position)
            yield key >> 3, value
            continue
        if wire == DELIMITED:
            length, position = _read_varint(data, position)
        elif wire in (FIXED32, FIXED64):
            length = 4 if wire == FIXED32 else 8
        else:
            raise MalformedExampleError(f"byte {position} has the unknown wire type {wire}")
        if position + length > size:
            raise MalformedExampleError(f"a field of {length} bytes at byte {position} leaves a message of {size}")
        yield key >> 3, data[position : position + length]
        position += length


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise MalformedExampleError(f"an integer does not end before byte {position}")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def _float_values(value: int | memoryview) -> FloatArray:
    if not isinstance(value, memoryview) or len(value) % 4:
        raise MalformedExampleError("a list of floats has a length that is not a multiple of 4")
    return np.frombuffer(value, "<f4")


def _integer_values(value: int | memoryview) -> IntArray:
    if not isinstance(value, memoryview):
        return np.array([value & 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.int64)
    raw = np.frombuffer(value, np.uint8)
    if not len(raw) or raw.max() < 128:  # one byte each, as booleans are
        return raw.astype(np.int64)
    ends = np.flatnonzero(raw < 128)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise MalformedExampleError("a list of integers ends within one")
    starts = np.concatenate([[0], ends[:-1] + 1])
    position = np.arange(len(raw)) - np.repeat(starts, ends - starts + 1)
    if position.max() > 9:
        raise MalformedExampleError("an integer has more than 10 bytes")
    shifted = (raw & 127).astype(np.uint64) << (7 * position).astype(np.uint64)
    return np.bitwise_or.reduceat(shifted, starts).view(np.int64)


def _varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF  # negative values are written as 64 bits
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _delimited(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | DELIMITED) + _varint(len(content)) + content
