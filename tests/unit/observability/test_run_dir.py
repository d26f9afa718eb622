import json
import logging
import os
from pathlib import Path

import pytest

from vlarl.errors import UsageError
from vlarl.observability.run_dir import RunDirectory


def test_create_makes_the_documented_folders(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "first")
    assert run.path == tmp_path / "runs" / "first"
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoints", "eval", "logs", "tensorboard", "videos"]
    assert run.name == "first"


def test_an_existing_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first")
    run.metrics_file.write_text("precious\n")
    with pytest.raises(UsageError, match="--resume") as caught:
        RunDirectory.create(tmp_path, "first")
    assert "--run.name" in str(caught.value)
    with pytest.raises(UsageError, match="--resume"):
        RunDirectory.refuse_existing(tmp_path, "first")
    assert run.metrics_file.read_text() == "precious\n"


def test_a_root_that_takes_no_files_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises(UsageError, match="cannot write to .*--run.root"):
        RunDirectory.create(tmp_path / "runs", "first")
    with pytest.raises(UsageError, match="cannot write to .*--run.root"):
        RunDirectory.create(tmp_path / "runs" / "deeper", "first")
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_root_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot write to"):
        RunDirectory.create(tmp_path, "first")


def test_refusing_makes_nothing(tmp_path: Path) -> None:
    RunDirectory.refuse_existing(tmp_path / "runs", "first")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc"])
def test_a_name_that_would_leave_the_root_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="run.name"):
        RunDirectory.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_open_explains_what_is_not_a_run(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first")
    run.write_status("running", 0, 10)
    assert RunDirectory.open(run.path) == run
    with pytest.raises(UsageError, match="no such folder; runs in .*: first"):
        RunDirectory.open(tmp_path / "frist")
    with pytest.raises(UsageError, match="neither config.yaml nor status.json; runs in .*: first"):
        RunDirectory.open(tmp_path)


def test_status_has_the_state_of_the_run_and_keeps_its_start(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first")
    run.write_status("running", 0, 10)
    first = json.loads(run.status_file.read_text())
    run.write_status("interrupted", 4, 10, "Ctrl-C")
    status = json.loads(run.status_file.read_text())
    assert (status["state"], status["iteration"], status["iterations"]) == ("interrupted", 4, 10)
    assert status["message"] == "Ctrl-C"
    assert status["started"] == first["started"] and status["updated"] >= first["updated"]
    assert status["pid"] == os.getpid() and status["host"] and "cores" in status["machine"]
    assert status["resume"] == f"vlarl train --resume {run.path}"
    assert [p.name for p in run.path.glob(".*")] == [], "no temporary file stays"


def test_truncation_drops_later_rows_and_a_partial_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first")
    rows = [{"iteration": i, "val/success_rate": i / 10, "train/kl": None} for i in range(5)]
    run.metrics_file.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"iteration": 5, "train/po')
    run.episodes_file.write_text('{"iteration": 2, "success": true}\n{"iteration": 3, "success": false}')
    run.truncate_after(2)
    assert [json.loads(line) for line in run.metrics_file.read_text().splitlines()] == rows[:3]
    assert run.episodes_file.read_text() == '{"iteration": 2, "success": true}\n'


def test_truncation_drops_what_an_unfinished_iteration_makes_again(tmp_path: Path) -> None:
    """Its rollout stays; its evaluation and its row of metrics don't."""
    run = RunDirectory.create(tmp_path, "first")
    run.metrics_file.write_text('{"iteration": 1}\n{"iteration": 2}\n')
    episodes = [(1, "rollout"), (1, "eval"), (2, "rollout"), (2, "eval"), (3, "rollout")]
    run.episodes_file.write_text("".join(json.dumps({"iteration": i, "phase": phase}) + "\n" for i, phase in episodes))
    run.samples_file.write_text(run.episodes_file.read_text())
    run.truncate_after(2, unfinished=True)
    assert run.samples_file.read_text() == run.episodes_file.read_text()
    assert run.metrics_file.read_text() == '{"iteration": 1}\n'
    kept = [json.loads(line) for line in run.episodes_file.read_text().splitlines()]
    assert [(row["iteration"], row["phase"]) for row in kept] == episodes[:3]


def test_a_pipe_in_place_of_rows_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    os.mkfifo(run.metrics_file)
    with pytest.raises(UsageError, match="metrics.jsonl is not a file: move it away"):
        run.truncate_after(2)


def test_truncation_keeps_a_last_row_that_only_lacks_its_newline(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first")
    run.metrics_file.write_text('{"iteration": 1}\n{"iteration": 2}')
    run.truncate_after(2)
    assert run.metrics_file.read_text() == '{"iteration": 1}\n{"iteration": 2}\n'


def test_the_log_file_takes_records_only_while_attached(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first")
    logger = logging.getLogger("vlarl.somewhere")
    with run.log_to_file():
        logger.info("inside %d", 7)
    logger.info("outside")
    text = run.log_file.read_text()
    assert "INFO" in text and "vlarl.somewhere: inside 7" in text and "outside" not in text


def test_removing_takes_away_what_was_made_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunDirectory.create("new/runs", "first").remove()
    assert list(tmp_path.iterdir()) == []
    Path("runs").mkdir()
    RunDirectory.create("runs", "first").remove()
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]
    first = RunDirectory.create(tmp_path / "other", "first")
    second = RunDirectory.create("other", "second")
    first.remove()
    second.remove()
    assert [path.name for path in Path("other").iterdir()] == [] and not first.path.exists()


def test_a_lock_can_be_looked_at(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "first")
    assert run.is_locked() is None, "no process has had it yet"
    with run.lock():
        assert run.is_locked() is True
    assert run.is_locked() is False


def test_one_process_at_a_time_works_on_a_run(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    with run.lock(), pytest.raises(UsageError, match="is in use by another process"):
        RunDirectory(run.path).lock()
    run.lock().close()


def test_a_run_that_was_killed_before_it_began_can_be_started_again_under_its_name(tmp_path: Path) -> None:
    """Its configuration was not written: there are empty folders, a lock that is free, its seal perhaps, and a file
    that is not whole."""
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    RunDirectory.create(tmp_path / "runs", "locked").lock().close()
    (tmp_path / "runs" / "locked" / ".config.yaml.123.tmp").write_text("run:\n")
    for name, rest in (("sealed", ".config.yaml.seal"), ("sealing", "..config.yaml.seal.123.tmp")):
        RunDirectory.create(tmp_path / "runs", name).lock().close()
        (tmp_path / "runs" / name / rest).write_text("0" * 64)
    for name in ("empty", "locked", "sealed", "sealing"):
        RunDirectory.refuse_existing(tmp_path / "runs", name)
        run = RunDirectory.create(tmp_path / "runs", name)
        with run.claim():
            run.write_config("run: {}\n")
        with pytest.raises(UsageError, match="exists already"):
            RunDirectory.create(tmp_path / "runs", name)


def test_one_that_another_process_begins_just_now_is_left_alone(tmp_path: Path) -> None:
    first, second = (RunDirectory.create(tmp_path, "run") for _ in range(2))  # both found an empty folder
    with first.claim():
        with pytest.raises(UsageError, match="exists already"):
            RunDirectory.refuse_existing(tmp_path, "run")
        with pytest.raises(UsageError, match="in use by another process"):
            second.claim()
        first.write_config("run: {}\n")
    with pytest.raises(UsageError, match="another process has just created"):
        second.claim()
    second.lock().close()


@pytest.mark.parametrize("file", ["notes.txt", "checkpoints/final/config.json", "logs/train.log", "config.yaml"])
def test_a_folder_with_anything_in_it_is_not_taken(tmp_path: Path, file: str) -> None:
    path = RunDirectory.create(tmp_path, "run").path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        RunDirectory.create(tmp_path, "run")


def test_removing_a_run_that_took_over_an_empty_folder_leaves_the_folder_above(tmp_path: Path) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    RunDirectory.create(tmp_path / "runs", "run").remove()
    assert (tmp_path / "runs").is_dir() and not (tmp_path / "runs" / "run").exists()
