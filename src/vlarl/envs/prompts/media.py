"""Images and videos of a row, in the forms that TRL's and verl's data have them."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlarl.types import UInt8Array

DATA_URI = "data:"


class MediaError(Exception):
    """An image or a video can't be used; the message is the end of a sentence about its row."""


def decode_image(
    value: Any, folder: Path, read: Callable[[Image.Image], UInt8Array] = lambda image: _pixels(image)
) -> UInt8Array:
    """[H, W, 3] an image given as a path, a data URI or base64, bytes, {"bytes", "path"}, an array or a PIL image.

    Paths are relative to `folder`. `read` makes an array of an opened image, which is not decoded yet.
    """
    if isinstance(value, Image.Image):
        return read(value)
    if isinstance(value, np.ndarray | list):
        return _array(value, 3, "an image [H, W, 3]")
    if isinstance(value, dict):
        found = value.get("bytes") or value.get("path") or value.get("image") or value.get("url")
        if found is None:
            raise MediaError('has an image with neither "bytes" nor "path"')
        return decode_image(found, folder, read)
    if isinstance(value, bytes | bytearray):
        return _decoded(bytes(value), "an image", read)
    if not isinstance(value, str):
        raise MediaError(f"has an image of type {type(value).__name__}; give a path, bytes, base64 or an array")
    if value.startswith(DATA_URI):
        return _decoded(_base64(value.partition(",")[2]), "an image", read)
    return _decoded(*_read(value, folder, "image"), read)


def blank_image(value: Any, folder: Path) -> UInt8Array:
    """[H, W, 3] a black image of the same size, which takes no memory; of a file only the header is decoded."""
    return decode_image(value, folder, lambda image: np.broadcast_to(np.uint8(0), (image.height, image.width, 3)))


def decode_video(value: Any, folder: Path, num_frames: int) -> tuple[UInt8Array, float | None]:
    """[T, H, W, 3] at most `num_frames` frames of a video given as the path of a file, an array or a list of images;
    and how many of these frames there are in a second, which only a file says."""
    if isinstance(value, dict):
        value = value.get("path") or value.get("video") or value.get("bytes")
    if isinstance(value, np.ndarray):
        return chosen_frames(_array(value, 4, "a video [T, H, W, 3]"), num_frames), None
    if isinstance(value, list) and value:
        if isinstance(value[0], list):
            return chosen_frames(_array(value, 4, "a video [T, H, W, 3]"), num_frames), None
        frames = [decode_image(value[index], folder) for index in _indices(len(value), num_frames)]
        if len({frame.shape for frame in frames}) > 1:
            raise MediaError("has a video whose frames differ in size")
        return np.stack(frames), None
    if not isinstance(value, str):
        raise MediaError(f"has a video of type {type(value).__name__}; give a path, an array or a list of images")
    return _frames_of_file(_existing(value, folder, "video"), num_frames)


def chosen_frames(frames: UInt8Array, count: int) -> UInt8Array:
    """At most `count` frames at equal distances, the first and the last among them."""
    return frames[_indices(len(frames), count)]


def _indices(length: int, count: int) -> list[int]:
    if length <= count:
        return list(range(length))
    return [int(index) for index in np.linspace(0, length - 1, count).round()]


def _frames_of_file(path: Path, num_frames: int) -> tuple[UInt8Array, float | None]:
    import imageio.v2 as imageio

    try:
        with imageio.get_reader(path) as opened:
            reader: Any = opened  # a reader of videos has more than its type says
            rate, length = reader.get_meta_data().get("fps"), reader.count_frames()
            wanted = set(_indices(length, num_frames))
            frames = [np.asarray(frame)[..., :3] for index, frame in enumerate(reader) if index in wanted]
    except (OSError, ValueError, IndexError, RuntimeError) as error:
        raise MediaError(f"has a corrupt video {path} ({str(error)[:100]})") from error
    if not frames:
        raise MediaError(f"has a video without frames, {path}")
    every = (length - 1) / (len(wanted) - 1) if len(wanted) > 1 else 1.0  # frames of the file to one of these
    return np.stack(frames).astype(np.uint8), float(rate) / every if rate else None


def _existing(text: str, folder: Path, kind: str) -> Path:
    path = folder / Path(text.removeprefix("file://")).expanduser()
    try:
        is_there = path.is_file()
    except OSError:  # such as a name that is too long
        is_there = False
    if not is_there:
        raise MediaError(f"names the {kind} {text[:100]!r}, and there is no file {str(path)[:200]}")
    return path


def check_reference(value: Any, folder: Path, kind: str) -> None:
    """Refuse the path of a file that is not there, without reading it."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and not value.startswith(DATA_URI) and _raw(value) is None:
        _existing(value, folder, kind)


def _read(text: str, folder: Path, kind: str) -> tuple[bytes, str]:
    raw = _raw(text)
    if raw is not None:
        return raw, f"an {kind}"
    path = _existing(text, folder, kind)
    return path.read_bytes(), f"the {kind} {path}"


def _raw(text: str) -> bytes | None:
    """The bytes of an image in base64; None for a path, which is shorter, or has an ending."""
    if len(text) < 64 or Path(text[-8:]).suffix:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaError("has an image whose base64 is not valid") from None


def _decoded(content: bytes, name: str, read: Callable[[Image.Image], UInt8Array]) -> UInt8Array:
    try:
        with Image.open(io.BytesIO(content)) as image:
            return read(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: a broken PNG
        raise MediaError(f"has a corrupt image: {name} can't be decoded ({str(error)[:100]})") from error


def _pixels(image: Image.Image) -> UInt8Array:
    return np.asarray(image.convert("RGB"), dtype=np.uint8)


def _array(value: np.ndarray[Any, Any] | Sequence[Any], dimensions: int, kind: str) -> UInt8Array:
    try:
        array = np.asarray(value)
    except ValueError:  # rows of unequal length
        array = np.zeros(0)
    whole = array.dtype.kind in "iu" and array.size > 0 and array.min() >= 0 and array.max() <= 255
    if array.ndim != dimensions or array.shape[-1] != 3 or not whole:
        raise MediaError(f"has an array {array.dtype}{list(array.shape)} in place of {kind} with values 0 to 255")
    return array.astype(np.uint8)
