"""Untrusted JSON: a pipe does not hang, endless nesting is invalid JSON, and a damaged file is an empty object."""

import os

import pytest

from vlarl.json_files import parse_json, read_json, read_object

DEEP = "[" * 100_000


def test_nesting_without_end_is_not_valid_json():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)


@pytest.mark.timeout(30)
def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_json(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"a": 1}', {"a": 1}), ("[1]", {}), ("{", {}), (DEEP, {}), ("\udcff", {}), (None, {})],
)
def test_what_holds_no_object_is_an_empty_one(tmp_path, text, expected):
    path = tmp_path / "status.json"
    if text is not None:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert read_object(path) == expected
