"""Antialiased bicubic resizing of frames that may not be square."""

from __future__ import annotations

from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from vlarl.types import UInt8Array

ResizeStrategy = Literal["resize-naive", "letterbox", "resize-crop"]
Color = tuple[int, int, int]


def bicubic_resize(image: UInt8Array, size: int, strategy: ResizeStrategy, fill: Color) -> UInt8Array:
    """A checkpoint's own preprocessor: antialiased bicubic, with its config's strategy for frames that are not square.

    `resize-naive` stretches, `letterbox` first pads to a square with the colour `fill`, `resize-crop` crops the longer
    side at both ends.
    """
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    pil_image = Image.fromarray(image)
    if strategy == "letterbox":
        longer = max(height, width)
        across, down = (longer - width) // 2, (longer - height) // 2
        pil_image = ImageOps.expand(pil_image, (across, down, across, down), fill)
    if strategy == "resize-naive":
        return np.asarray(pil_image.resize((size, size), Image.Resampling.BICUBIC))
    shorter = min(pil_image.size)
    wide, high = (int(size * side / shorter) for side in pil_image.size)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    scaled = pil_image.resize((wide, high), Image.Resampling.BICUBIC)
    return np.asarray(scaled.crop((left, top, left + size, top + size)))
