"""The log of a run stays within bounds, and a disk that is full costs nothing but records."""

import logging
from pathlib import Path

import pytest

from vlarl.observability import log_file
from vlarl.observability.log_file import log_to_file

LOG = logging.getLogger("vlarl.of_a_test")


def test_records_without_end_are_cut(tmp_path: Path) -> None:
    with log_to_file(tmp_path / "train.log"):
        LOG.warning("x" * 50_000_000)
        try:
            raise ValueError("y" * 50_000_000)
        except ValueError:
            LOG.exception("it failed")
    text = (tmp_path / "train.log").read_text()
    assert len(text) < 70_000 and text.count("characters left out") == 2 and "ValueError: yyy" in text


def test_a_log_that_grows_too_large_is_continued_in_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "LARGEST_LOG", 10_000)
    with log_to_file(tmp_path / "train.log"):
        for number in range(1000):
            LOG.warning("record %d", number)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sorted(sizes) == ["train.log", "train.log.1"] and max(sizes.values()) <= 10_000
    assert "record 999" in (tmp_path / "train.log").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").symlink_to("/dev/full")
    with log_to_file(tmp_path / "train.log"):
        for _ in range(3):
            LOG.warning("lost")
    errors = capsys.readouterr().err
    assert errors.count("cannot write") == 1 and "No space left" in errors and "Traceback" not in errors
