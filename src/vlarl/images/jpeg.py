"""JPEG as TensorFlow reads and writes it, without TensorFlow: as applied to RLDS data and OpenVLA's LIBERO frames.

TensorFlow decodes with libjpeg's fast inverse DCT, several grey levels off the exact one, and interpolates chroma.
Pillow has either the fast DCT or the interpolation; simplejpeg, a small wheel around libjpeg-turbo, has both.
"""

from __future__ import annotations

from io import BytesIO

import numpy as np
import simplejpeg
from PIL import Image

from vlarl.types import UInt8Array

QUALITY = 95
JPEG_START = b"\xff\xd8"


def jpeg_round_trip(image: UInt8Array) -> UInt8Array:
    """Encode and decode as TensorFlow does."""
    return decode_image(encode_jpeg(image))


def encode_jpeg(image: UInt8Array) -> bytes:
    """[H, W, 3] at quality 95 with halved chroma, TensorFlow's defaults."""
    file = BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return file.getvalue()


def encode_png(image: UInt8Array) -> bytes:
    """[H, W, 3] without loss; fast rather than small."""
    file = BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def decode_image(data: bytes | memoryview) -> UInt8Array:
    """[H, W, 3] of a JPEG or PNG as TensorFlow's decode_image returns it; ValueError or OSError if it is damaged."""
    if data[:2] != JPEG_START:
        return np.asarray(Image.open(BytesIO(data), formats=("PNG",)).convert("RGB"))
    decoded: UInt8Array = simplejpeg.decode_jpeg(data, colorspace="RGB", fastdct=True, fastupsample=False)
    return decoded
