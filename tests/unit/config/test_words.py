"""Counts and paths in what is printed."""

from pathlib import Path

import pytest

from vlarl.config.paths import brief
from vlarl.config.words import counted


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "episode", "0 episodes"),
        (1, "episode", "1 episode"),
        (2, "evaluated episode", "2 evaluated episodes"),
        (1, "process", "1 process"),
        (4, "process", "4 processes"),
        (12_000, "step", "12,000 steps"),
    ],
)
def test_counts(count, noun, text):
    assert counted(count, noun) == text


def test_paths_are_short_where_they_lie_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert brief(tmp_path / "runs" / "a") == "runs/a"
    assert brief("runs/a/") == "runs/a"
    assert brief(tmp_path.parent) == str(tmp_path.parent)
    assert brief("org/model") == "org/model" and brief("builtin:tiny-oft") == "builtin:tiny-oft"
    assert brief("~/x") == str(Path.home() / "x")
