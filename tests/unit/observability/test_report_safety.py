"""A report of a hostile run: everything is escaped, and only the run's own files are in it."""

import base64
import json

import pytest

from vlarl.config.training_data import TrainedOn, TrainingData, write_training_data
from vlarl.observability.report import write_report
from vlarl.observability.run_dir import RunDirectory

EVIL = "</script></style></code><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "first")


def test_no_text_of_any_file_becomes_markup(run):
    run.config_file.write_text(
        json.dumps(
            {
                "env": {"suite": EVIL},
                "policy": {"path": EVIL},
                "algorithm": {"name": EVIL},
                "run": {"seed": EVIL},
                "curriculum": {"mode": EVIL},
                "gym": {"env": EVIL},
            }
        )
    )
    fields = ("state", "message", "machine", "host", "resume", "iterations")
    run.status_file.write_text(json.dumps(dict.fromkeys(fields, EVIL)))
    rows = [{"iteration": i, "curriculum/task_01_probability": 0.5, EVIL: 1.0, "train/loss": 1.0} for i in (0, 1)]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    episode = {"phase": "eval", "task_id": 1, "init_state": 2, "success": True, "instruction": EVIL, "episode_id": EVIL}
    run.episodes_file.write_text("".join(json.dumps({"iteration": i, **episode}) + "\n" for i in (0, 1)))
    (run.videos / "iter_0000_task01_state02_success.mp4").write_bytes(b"video")
    (run.checkpoints / "final").mkdir()
    trained = TrainingData((TrainedOn(by="train", suite=EVIL),), (EVIL,))
    write_training_data(run.checkpoints / "final", trained)
    html = write_report(run.path).read_text()
    assert "&lt;script&gt;" in html
    assert "<script" not in html and "<img" not in html and "</script" not in html


def test_links_out_of_the_run_are_not_followed(run, tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("PRIVATE KEY")
    (run.videos / "iter_0000_task00_state00_success.mp4").symlink_to(secret)
    (run.videos / "iter_0000_task01_state00_success.mp4").write_bytes(b"own video")
    (run.videos / "real").mkdir()
    (run.videos / "iter_0000_task02_state00_success.mp4").symlink_to(
        run.videos / "iter_0000_task01_state00_success.mp4"
    )
    run.config_file.symlink_to(secret)
    run.write_status("finished", 1, 1)
    html = write_report(run.path).read_text()
    assert "PRIVATE KEY" not in html and base64.b64encode(b"PRIVATE KEY").decode() not in html
    assert html.count(base64.b64encode(b"own video").decode()) == 2, "a link inside the run is the run's"


def test_a_folder_of_videos_that_is_a_link_is_left_out(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "iter_0000_task00_state00_success.mp4").write_bytes(b"private video")
    run.videos.rmdir()
    run.videos.symlink_to(tmp_path / "elsewhere")
    run.write_status("finished", 1, 1)
    assert base64.b64encode(b"private video").decode() not in write_report(run.path).read_text()


def test_an_older_runs_token_is_masked(run):
    run.config_file.write_text("reward:\n  url: https://judge/score?token=s3cr3tT0ken\n")
    run.write_status("finished", 1, 1)
    html = write_report(run.path).read_text()
    assert "s3cr3tT0ken" not in html and "score?token=***" in html
