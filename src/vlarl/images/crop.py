"""The centre crop of checkpoints that were trained with crop augmentation, as TensorFlow's crop_and_resize does it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from vlarl.types import FloatArray, IntArray, UInt8Array

CROP_AREA = 0.9
FLOAT_TO_BYTE = np.float32(255.5)  # TensorFlow truncates this product, which is not quite rounding


def center_crop(image: UInt8Array, area: float = CROP_AREA) -> UInt8Array:
    """The middle of a square image, the fraction `area` of its pixels, resized back like TensorFlow's
    crop_and_resize."""
    low, high, fraction = _crop_coordinates(image.shape[0], area)
    channels = np.ascontiguousarray(image.transpose(2, 0, 1), dtype=np.float32) * np.float32(1 / 255)
    left = channels.take(low, axis=2)
    mixed = left + (channels.take(high, axis=2) - left) * fraction
    top = mixed.take(low, axis=1)
    cropped = top + (mixed.take(high, axis=1) - top) * fraction[:, None]
    return np.minimum(cropped * FLOAT_TO_BYTE, 255.0).astype(np.uint8).transpose(1, 2, 0)


@lru_cache(maxsize=64)
def _crop_coordinates(size: int, area: float) -> tuple[IntArray, IntArray, FloatArray]:
    """For each pixel of the crop: the pixels on either side, and its fraction between them. Corners are aligned."""
    side = np.sqrt(np.float32(area))
    start = (np.float32(1) - side) / 2
    coordinates = start * (size - 1) + np.arange(size, dtype=np.float32) * side
    low = np.floor(coordinates)
    return low.astype(np.int64), np.ceil(coordinates).astype(np.int64), (coordinates - low).astype(np.float32)
