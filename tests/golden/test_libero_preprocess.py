"""LIBERO frames through JPEG, Lanczos and crop, against what TensorFlow computes."""

import numpy as np
from comparisons import assert_nearly_equal, check_cropped, check_resized, libero_arrays, libero_processor, upright

from vlarl.policies.openvla.images import ImagePipeline


def test_jpeg_and_lanczos():
    check_resized(libero_arrays())


def test_center_crop():
    check_cropped(libero_arrays())


def test_every_golden_array_is_compared():
    expected = libero_arrays()
    check_resized(expected)
    check_cropped(expected)
    assert expected.read == set(expected)


def test_the_whole_way():
    expected = libero_arrays()
    processor = libero_processor(ImagePipeline(jpeg=True, resize="lanczos3", center_crop=True))
    ours = np.stack([processor._pixels(upright(frame)[None])[0] for frame in expected["agentview"]])
    assert_nearly_equal(ours, expected["center_cropped"])
