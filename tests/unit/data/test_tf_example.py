"""tf.train.Example: known bytes, round trips, other writers' choices, and garbage."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlarl.data.rlds.tf_example import (
    BYTES_LIST,
    FLOAT_LIST,
    INT64_LIST,
    Example,
    MalformedExampleError,
    encode_example,
)

floats = st.lists(st.floats(width=32), max_size=20).map(lambda v: np.array(v, np.float32))
integers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20).map(lambda v: np.array(v, np.int64))
features = st.dictionaries(st.text(max_size=8), floats | integers | st.lists(st.binary(max_size=200), max_size=5))


def test_the_bytes_are_those_of_the_format():
    """Written by hand after the protobuf specification."""
    features = {"a": [b"xy"], "f": np.array([1.0], np.float32), "i": np.array([-1, 300], np.int64)}
    one = b"\x0a\x01a\x12\x06\x0a\x04\x0a\x02xy"
    two = b"\x0a\x01f\x12\x08\x12\x06\x0a\x04\x00\x00\x80\x3f"
    three = b"\x0a\x01i\x12\x10\x1a\x0e\x0a\x0c" + b"\xff" * 9 + b"\x01" + b"\xac\x02"
    entries = b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in (one, two, three))
    assert encode_example(features) == b"\x0a" + bytes([len(entries)]) + entries


@settings(max_examples=80)
@given(features)
def test_what_is_encoded_is_decoded(features):
    example = Example(encode_example(features))
    assert set(example.names) == set(features)
    for name, values in features.items():
        if isinstance(values, list):
            assert example.texts(name) == values and example.kind(name) == BYTES_LIST
        elif values.dtype == np.float32:
            np.testing.assert_array_equal(example.floats(name), values)
            assert example.floats(name).dtype == np.float32 and example.kind(name) == FLOAT_LIST
        else:
            np.testing.assert_array_equal(example.integers(name), values)
            assert example.integers(name).dtype == np.int64 and example.kind(name) == INT64_LIST


def test_unpacked_values_are_read_too():
    """Protobuf lets a writer repeat the field instead of packing the values."""
    floats = b"\x12\x0a\x0d\x00\x00\x80\x3f\x0d\x00\x00\x00\x40"
    integers = b"\x1a\x05\x08\x07\x08\xac\x02"
    entries = [b"\x0a\x01f\x12" + bytes([len(floats)]) + floats, b"\x0a\x01i\x12" + bytes([len(integers)]) + integers]
    inner = b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in entries)
    example = Example(b"\x0a" + bytes([len(inner)]) + inner)
    np.testing.assert_array_equal(example.floats("f"), [1.0, 2.0])
    np.testing.assert_array_equal(example.integers("i"), [7, 300])


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_garbage_is_refused_and_nothing_else_happens(data):
    with contextlib.suppress(MalformedExampleError, UnicodeDecodeError):
        example = Example(data)
        for name in example.names:
            for read in (example.texts, example.floats, example.integers):
                with contextlib.suppress(MalformedExampleError):
                    read(name)


def test_another_kind_and_another_name_are_refused():
    example = Example(encode_example({"a": [b"x"]}))
    with pytest.raises(MalformedExampleError, match="'a' holds values of another kind"):
        example.floats("a")
    with pytest.raises(MalformedExampleError, match="no field 'b'; it has a"):
        example.floats("b")
    assert Example(b"\x0a\x05\x0a\x03\x0a\x01n").floats("n").shape == (0,)  # a feature that says no kind


def test_only_three_kinds_can_be_written():
    with pytest.raises(TypeError, match="float64"):
        encode_example({"a": np.zeros(3)})
