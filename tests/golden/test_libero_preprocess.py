"""LIBERO frames from the renderer through the turn, JPEG, Lanczos and crop, against what TensorFlow computes."""

import pytest
from comparisons import LIBERO_CHECKS, libero_arrays
from fakes.golden_arrays import unnoticed


@pytest.mark.parametrize("check", LIBERO_CHECKS)
def test_equals_tensorflow(check):
    check(libero_arrays())


def test_every_golden_array_is_compared():
    assert unnoticed(libero_arrays(), LIBERO_CHECKS) == []
