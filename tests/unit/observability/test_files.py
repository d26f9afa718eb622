"""Writing a file whole or not at all: seen by a reader, by the disk, and by a write that fails half-way."""

import os
import resource
import threading
import time
from pathlib import Path

import pytest
from fakes.disk import Disk, PowerCutError

from vlarl.errors import VlarlError
from vlarl.observability.files import write_atomically


def test_a_reader_sees_the_old_content_or_the_new_one(tmp_path: Path) -> None:
    """Never a part of one, and never no file."""
    path, size = tmp_path / "status.json", 200_000
    write_atomically(path, "0" * size)
    seen: set[str] = set()
    problems: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError:
                problems.append("no file")
                continue
            if len(text) != size or len(set(text)) != 1:
                problems.append(f"{len(text)} characters of {sorted(set(text))}")
            seen.update(text[:1])

    reader = threading.Thread(target=read)
    reader.start()
    end = time.monotonic() + 20
    for number in range(2000):
        write_atomically(path, str(number % 10) * size)
        if number >= 200 and (problems or len(seen) >= 5) or time.monotonic() > end:
            break
    done.set()
    reader.join(10)
    assert problems == []
    assert len(seen) > 1, "the reader saw several of them"


def test_the_content_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    path.write_text("old")
    disk = Disk(monkeypatch)
    write_atomically(path, "new")
    (temporary,) = [file for what, file in disk.log if what == "replace"]
    (synced,), (named,) = disk.places("fsync", temporary), disk.places("replace", temporary)
    assert synced < named
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_power_cut_at_any_step_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        write_atomically(tmp_path / "undisturbed", "new")
    steps = [what for what, _ in disk.log]
    assert steps[:2] == ["fsync", "replace"]
    for cut_at in range(len(steps)):
        path = tmp_path / str(cut_at)
        path.write_text("old")
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, cut_at)
            with pytest.raises(PowerCutError):
                write_atomically(path, "new")
        assert path.read_text() == ("new" if cut_at > 1 else "old")


def test_a_write_that_fails_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """The system refuses to let a file grow beyond 64 kB: a part of the content is written, the rest is not."""
    path = tmp_path / "status.json"
    write_atomically(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(VlarlError, match=r"cannot write .*status.json: File too large: check the disk"):
            write_atomically(path, "n" * (1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["status.json"]
