"""The size of a PNG or JPEG image, from its header: known before anything is decoded or memory is allocated for it."""

from __future__ import annotations

import struct

PNG_START, JPEG_START = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
MAX_PIXELS = 1 << 24  # of one frame: 4096 x 4096

# JPEG's markers: those of a frame give its size, standalone ones have no length.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_STANDALONE = frozenset(range(0xD0, 0xD8)) | {0x01}
_START_OF_SCAN, _END = 0xDA, 0xD9


class NotAnImageError(ValueError):
    """Bytes that are neither PNG nor JPEG, or end before their size."""


class ImageSizes:
    """Sizes of the frames of a camera. Headers that are equal up to the size say the same, so one is read once."""

    def __init__(self) -> None:
        self._header, self._size = b"", (0, 0)

    def of(self, data: memoryview) -> tuple[int, int]:
        """(height, width) of an encoded image."""
        if not self._header or data[: len(self._header)] != self._header:
            self._size, end = _size_and_end(data)
            self._header = bytes(data[:end])
        return self._size


def image_size(data: memoryview) -> tuple[int, int]:
    """(height, width) of an encoded image."""
    return _size_and_end(data)[0]


def _size_and_end(data: memoryview) -> tuple[tuple[int, int], int]:
    """(height, width), and how many bytes say so."""
    if bytes(data[:8]) == PNG_START:
        if len(data) < 24 or bytes(data[12:16]) != b"IHDR":
            raise NotAnImageError("is a damaged PNG")
        width, height = struct.unpack_from(">II", data, 16)
        end = 24
    elif bytes(data[:2]) == JPEG_START:
        height, width, end = _jpeg_size(data)
    else:
        raise NotAnImageError("is neither PNG nor JPEG")
    if not 0 < height * width <= MAX_PIXELS:
        raise NotAnImageError(f"says that it has {height:,} x {width:,} pixels, and {MAX_PIXELS:,} are allowed")
    return (height, width), end


def _jpeg_size(data: memoryview) -> tuple[int, int, int]:
    """Step from marker to marker up to that of the frame."""
    position = 2
    while position + 9 <= len(data):
        if data[position] != 0xFF:
            raise NotAnImageError("is a damaged JPEG")
        marker = data[position + 1]
        if marker == 0xFF:  # padding
            position += 1
        elif marker in _STANDALONE:
            position += 2
        elif marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 5)
            return height, width, position + 9
        elif marker in (_START_OF_SCAN, _END):
            break
        else:
            position += 2 + int(struct.unpack_from(">H", data, position + 2)[0])
    raise NotAnImageError("is a damaged JPEG")
