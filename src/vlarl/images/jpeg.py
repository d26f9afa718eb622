"""JPEG as TensorFlow reads and writes it, without TensorFlow: as applied to RLDS data and OpenVLA's LIBERO frames.

TensorFlow decodes with libjpeg's fast inverse DCT, several grey levels off the exact one, and interpolates chroma.
Pillow has either the fast DCT or the interpolation, so interpolation and colours are computed here, with libjpeg's
integers: bit-exact.
"""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin

from vlarl.types import UInt8Array

Int16Array = NDArray[np.int16]

QUALITY = 95
HALVED_CHROMA = [(2, 2), (1, 1), (1, 1)]  # 4:2:0, in samples of luma, blue and red
JPEG_START = b"\xff\xd8"
# libjpeg's weights of blue and red chroma in red, green and blue, times 2**16
RED_OF_RED, GREEN_OF_BLUE, GREEN_OF_RED, BLUE_OF_BLUE = 91881, -22554, -46802, 116130
HALF = 1 << 15


def jpeg_round_trip(image: UInt8Array) -> UInt8Array:
    """Encode and decode as TensorFlow does."""
    return decode_image(encode_jpeg(image))


def encode_jpeg(image: UInt8Array) -> bytes:
    """[H, W, 3] at quality 95 with halved chroma, TensorFlow's defaults."""
    file = BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return file.getvalue()


def decode_image(data: bytes) -> UInt8Array:
    """[H, W, 3] of a JPEG or PNG as TensorFlow's decode_image returns it; without halved chroma as Pillow does."""
    if not data.startswith(JPEG_START):
        return np.asarray(Image.open(BytesIO(data), formats=("PNG",)).convert("RGB"))
    jpeg = JpegImagePlugin.JpegImageFile(BytesIO(data))  # Image.open would detect the format first
    sampling = [layer[1:3] for layer in jpeg.layer]
    if sampling != HALVED_CHROMA:
        return np.asarray(jpeg.convert("RGB"))
    jpeg.draft("YCbCr", jpeg.size)
    jpeg.decoderconfig = (1, 1)  # the fast DCT, and chroma values repeated instead of interpolated
    planes = np.asarray(jpeg)  # [H, W, 3] luma, blue, red
    height, width = planes.shape[:2]
    blue, red = _interpolated(planes[::2, ::2, 1:])[:, :height, :width].astype(np.int32)
    return _to_rgb(planes[:, :, 0], blue, red)


def _interpolated(chroma: UInt8Array) -> Int16Array:
    """[h, w, 2] -> [2, 2h, 2w] around zero: three parts of the near value, one of the far, rounded as libjpeg does."""
    height, width = chroma.shape[:2]
    padded = np.empty((2, height + 2, width + 2), np.int16)
    padded[:, 1:-1, 1:-1] = chroma.transpose(2, 0, 1)
    padded[:, 1:-1, 1:-1] -= 128
    padded[:, 0], padded[:, -1] = padded[:, 1], padded[:, -2]
    padded[:, :, 0], padded[:, :, -1] = padded[:, :, 1], padded[:, :, -2]
    near = 3 * padded[:, 1:-1]
    rows = np.empty((2, height, 2, width + 2), np.int16)
    np.add(near, padded[:, :-2], out=rows[:, :, 0])
    np.add(near, padded[:, 2:], out=rows[:, :, 1])
    rows = rows.reshape(2, 2 * height, width + 2)
    near = 3 * rows[:, :, 1:-1]
    columns = np.empty((2, 2 * height, width, 2), np.int16)
    columns[..., 0] = (near + rows[:, :, :-2] + 8) >> 4
    columns[..., 1] = (near + rows[:, :, 2:] + 7) >> 4
    return columns.reshape(2, 2 * height, 2 * width)


def _to_rgb(luma: UInt8Array, blue: NDArray[np.int32], red: NDArray[np.int32]) -> UInt8Array:
    rgb = np.empty((*luma.shape, 3), np.uint8)
    rounded = luma.astype(np.int32)
    rounded <<= 16
    rounded += HALF
    added = (RED_OF_RED * red, GREEN_OF_BLUE * blue + GREEN_OF_RED * red, BLUE_OF_BLUE * blue)
    for channel, weighted in enumerate(added):
        weighted += rounded
        weighted >>= 16
        np.maximum(weighted, 0, out=weighted)
        rgb[:, :, channel] = np.minimum(weighted, 255, out=weighted)
    return rgb
