import json
import os
import sys
import time
from pathlib import Path

import pytest

from vlarl.errors import MissingExtraError, VlarlError
from vlarl.observability.sinks import JsonlSink, TensorBoardSink, WandbSink


def test_jsonl_rows_can_be_tailed_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    before = time.time()
    sink.write(0, {"val/success_rate": 0.5})
    row = json.loads(path.read_text())  # readable although the sink is open
    assert row["iteration"] == 0 and row["val/success_rate"] == 0.5
    assert before - 1 <= row["time"] <= time.time() + 1
    sink.close()
    again = JsonlSink(path)
    again.write(1, {"val/success_rate": 0.75})
    again.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [0, 1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_names_the_file_and_the_remedy() -> None:
    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(VlarlError, match="/dev/full.*disk is full.*--resume"):
        sink.write(0, {"a": 1.0})
    with pytest.raises(VlarlError):
        sink.close()


def _scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(e.step, round(e.value, 4)) for e in events.Scalars(tag)]


def test_tensorboard_hides_what_a_resumed_run_goes_through_again(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for iteration in range(5):
        first.write(iteration, {"val/success_rate": 0.1 * iteration})
    first.close()
    # Event files are ordered by their second of creation.
    for path in tmp_path.iterdir():
        path.rename(path.with_name(path.name.replace("tfevents.", "tfevents.0")))
    resumed = TensorBoardSink(tmp_path, resume_after=2)
    resumed.write(3, {"val/success_rate": 0.9})
    resumed.close()
    assert _scalars(tmp_path, "val/success_rate") == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.9)]


def test_wandb_offline_writes_into_the_run_and_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # W&B keeps caches and settings there
    monkeypatch.setattr(sys, "argv", ["vlarl", "train", "--reward.url", "http://h/score?token=s3cr3tT0ken"])
    for session in range(2):
        sink = WandbSink(tmp_path, project="vlarl", name="first", group="g", mode="offline", config={"seed": 1})
        sink.write(session, {"val/success_rate": 0.5})
        sink.close()
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert files and {path.name for path in files} == {f"run-{run_id}.wandb"}
    written = b"".join(path.read_bytes() for path in files)
    assert b"val/success_rate" in written
    assert b"http://h/score?token=***" in written and b"s3cr3tT0ken" not in written, "the command line is sent along"
    assert sys.argv[-1].endswith("s3cr3tT0ken")


def test_a_missing_wandb_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import raises ImportError
    with pytest.raises(MissingExtraError, match=r"vlarl\[wandb\]"):
        WandbSink(tmp_path, project="vlarl", name="first")
    assert list(tmp_path.iterdir()) == []
