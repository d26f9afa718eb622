"""Camera frames -> the model's size, as the code that trained the published checkpoints does it, without TensorFlow.

OpenVLA's LIBERO data went through JPEG, a Lanczos resize and, with crop augmentation, a crop; evaluation repeats them.
All functions take and give uint8 [H, W, 3].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast, get_args

import numpy as np
from PIL import Image, ImageOps

from vlarl.policies.openvla.jpeg import decode_image, encode_jpeg
from vlarl.types import FloatArray, IntArray, UInt8Array

ResizeStrategy = Literal["resize-naive", "letterbox", "resize-crop"]
Color = tuple[int, int, int]

CROP_AREA = 0.9
FLOAT_TO_BYTE = np.float32(255.5)  # TensorFlow cuts off the fraction of this product, which is not quite rounding
LANCZOS_RADIUS = 3


@dataclass(frozen=True, kw_only=True)
class ImagePipeline:
    """What happens to a frame before the towers, in this order; the default is a checkpoint's own preprocessor."""

    jpeg: bool = False
    resize: Literal["bicubic", "lanczos3"] = "bicubic"
    center_crop: bool = False


def jpeg_round_trip(image: UInt8Array) -> UInt8Array:
    """Encode and decode as TensorFlow does."""
    return decode_image(encode_jpeg(image))


def lanczos_resize(image: UInt8Array, size: int) -> UInt8Array:
    """Lanczos3 with antialias to a square, as TensorFlow's resize: rounded once, at the end."""
    shrunk = _resampled(image.astype(np.float32), size).transpose(1, 0, 2)
    return _to_uint8(_resampled(shrunk, size).transpose(1, 0, 2))


def center_crop(image: UInt8Array, area: float = CROP_AREA) -> UInt8Array:
    """The middle of a square image, a share `area` of its pixels, resized back as TensorFlow's crop_and_resize does."""
    low, high, fraction = _crop_places(image.shape[0], area)
    channels = np.ascontiguousarray(image.transpose(2, 0, 1), dtype=np.float32) * np.float32(1 / 255)
    left = channels.take(low, axis=2)
    mixed = left + (channels.take(high, axis=2) - left) * fraction
    top = mixed.take(low, axis=1)
    cropped = top + (mixed.take(high, axis=1) - top) * fraction[:, None]
    return np.minimum(cropped * FLOAT_TO_BYTE, 255.0).astype(np.uint8).transpose(1, 2, 0)


def bicubic_resize(image: UInt8Array, size: int, strategy: ResizeStrategy, fill: Color) -> UInt8Array:
    """A checkpoint's own preprocessor: antialiased bicubic, by the strategy of its config for frames not square.

    `resize-naive` stretches, `letterbox` first pads to a square with the colour `fill`, `resize-crop` cuts the ends of
    the longer side off.
    """
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    picture = Image.fromarray(image)
    if strategy == "letterbox":
        longer = max(height, width)
        across, down = (longer - width) // 2, (longer - height) // 2
        picture = ImageOps.expand(picture, (across, down, across, down), fill)
    if strategy == "resize-naive":
        return np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC))
    shorter = min(picture.size)
    wide, high = (int(size * side / shorter) for side in picture.size)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    scaled = picture.resize((wide, high), Image.Resampling.BICUBIC)
    return np.asarray(scaled.crop((left, top, left + size, top + size)))


def resize_strategy(raw_config: Mapping[str, object]) -> ResizeStrategy:
    """The strategy that a config.json names; `resize-naive`, which every published OpenVLA has, where it names none."""
    name = raw_config.get("image_resize_strategy", "resize-naive")
    if name not in get_args(ResizeStrategy):
        known = ", ".join(get_args(ResizeStrategy))
        raise ValueError(f"image_resize_strategy {name!r} of config.json is unknown: it must be one of {known}")
    return cast(ResizeStrategy, name)


def _to_uint8(values: np.ndarray) -> UInt8Array:
    rounded: UInt8Array = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return rounded


def _resampled(image: FloatArray, size: int) -> FloatArray:
    """[H, W, C] -> [size, W, C]. No matrix product, whose threads would get in the way of those that share pictures."""
    lines = np.ascontiguousarray(image).reshape(len(image), -1)
    sums = np.zeros((size, lines.shape[1]), np.float32)
    near = np.empty_like(sums)
    for places, shares in zip(*_lanczos_taps(len(image), size), strict=True):
        np.take(lines, places, axis=0, out=near, mode="clip")
        near *= shares[:, None]
        sums += near
    return sums.reshape(size, *image.shape[1:])


@lru_cache(maxsize=64)
def _lanczos_taps(source: int, target: int) -> tuple[IntArray, FloatArray]:
    """[taps, target] the lines that each new one is made of, and their shares in it, which add up to 1.

    Shrinking widens the kernel, which is the antialias. Lines beyond the edge have no share.
    """
    step = source / target
    scale = max(step, 1.0)
    centers = (np.arange(target) + 0.5) * step
    first = np.floor(centers - LANCZOS_RADIUS * scale).astype(np.int64)
    lines = first + np.arange(int(2 * LANCZOS_RADIUS * scale) + 2)[:, None]
    distance = (lines + 0.5 - centers) / scale
    counts = (np.abs(distance) < LANCZOS_RADIUS) & (lines >= 0) & (lines < source)
    kernel = np.sinc(distance) * np.sinc(distance / LANCZOS_RADIUS) * counts
    return lines, (kernel / kernel.sum(axis=0)).astype(np.float32)


@lru_cache(maxsize=64)
def _crop_places(size: int, area: float) -> tuple[IntArray, IntArray, FloatArray]:
    """For each pixel of the crop: the pixels on either side, and how far between them it lies. Corners are aligned."""
    side = np.sqrt(np.float32(area))
    start = (np.float32(1) - side) / 2
    places = start * (size - 1) + np.arange(size, dtype=np.float32) * side
    low = np.floor(places)
    return low.astype(np.int64), np.ceil(places).astype(np.int64), (places - low).astype(np.float32)
