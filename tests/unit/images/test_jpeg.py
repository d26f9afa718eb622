"""JPEG as TensorFlow decodes it; the golden RLDS data holds it to the last bit (tests/golden/test_rlds_golden.py)."""

import io

import numpy as np
import pytest
from PIL import Image, JpegImagePlugin

from vlarl.images.jpeg import decode_image, encode_jpeg


def smooth(height: int, width: int) -> np.ndarray:
    rows, columns = np.mgrid[0:height, 0:width]
    image = np.stack([rows * 4, columns * 4, 255 - rows * 2 - columns], axis=2)
    return np.clip(image, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("size", [(32, 48), (31, 47), (17, 16), (1, 1), (2, 3)])
def test_any_size_comes_back_nearly(size):
    decoded = decode_image(encode_jpeg(smooth(*size)))
    assert decoded.shape == (*size, 3) and decoded.dtype == np.uint8
    assert np.abs(decoded.astype(int) - smooth(*size)).max() <= 8


def test_whole_chroma_is_read_with_the_fast_transform():
    """Where there is nothing to interpolate, Pillow's draft mode is the fast transform alone."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "JPEG", quality=95, subsampling="4:4:4")
    draft = JpegImagePlugin.JpegImageFile(io.BytesIO(file.getvalue()))
    draft.decoderconfig = (1, 1)
    decoded = decode_image(file.getvalue())
    np.testing.assert_array_equal(decoded, np.asarray(draft))
    assert (decoded != np.asarray(Image.open(file))).any(), "the exact transform gives other values"


def test_damaged_images_are_refused():
    data = encode_jpeg(smooth(32, 48))
    for damaged in (data[: len(data) // 2], data[:20], b"\xff\xd8" + bytes(40), b"no image"):
        with pytest.raises((ValueError, OSError)):
            decode_image(damaged)


def test_other_formats_and_greys_are_read_too():
    file = io.BytesIO()
    Image.fromarray(smooth(9, 9)).save(file, "PNG")
    np.testing.assert_array_equal(decode_image(file.getvalue()), smooth(9, 9))
    file = io.BytesIO()
    Image.fromarray(smooth(8, 8)[:, :, 0]).save(file, "JPEG", quality=100)
    grey = decode_image(file.getvalue())
    assert grey.shape == (8, 8, 3) and (grey[:, :, 0] == grey[:, :, 2]).all()
