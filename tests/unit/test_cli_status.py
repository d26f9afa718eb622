"""`vlarl status` on the files of made-up runs."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vlarl.cli import main
from vlarl.observability.run_dir import RunDirectory


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # however long a test takes
    return tmp_path / "runs"


def make_run(name: str, state: str = "running", iteration: int = 3, **changes: Any) -> RunDirectory:
    """A run of ten iterations, 20 s each, that began 100 s ago and last wrote its status 5 s ago."""
    run = RunDirectory.create("runs", name)
    run.config_file.write_text("run: {}\n")
    rows: list[dict[str, Any]] = [{"iteration": 0, "val/success_rate": 0.25, "time/iteration": 900.0}]
    rows += [{"iteration": i, "rollout/success_rate": i / 10, "time/iteration": 20.0} for i in range(1, iteration + 1)]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.write_status(state, iteration, 10, changes.pop("message", ""))  # type: ignore[arg-type]
    now = time.time()
    saved = run.read_status() | {"started": now - 100, "updated": now - 5, **changes}
    run.status_file.write_text(json.dumps(saved))
    return run


def status_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["status", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["status", *arguments]) == 0
    return capsys.readouterr().out


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_under_way(runs, capsys, monkeypatch):
    run = make_run("first")
    run.log_file.write_text("".join(f"line {number} {'x' * 100}\n" for number in range(500)))
    (run.logs / "engine-0.log").write_text("e" * 1234)
    (run.logs / "learner-1.log").write_text("")
    with run.lock():
        facts, text = status_of(capsys, "first"), shown(capsys, "first")
    assert (facts["run"], facts["path"], facts["state"]) == ("first", "runs/first", "running")
    assert (facts["iteration"], facts["iterations"]) == (3, 10)
    assert facts["elapsed_s"] == pytest.approx(100)
    assert facts["left_s"] == pytest.approx(7 * 20 - 5)  # the evaluation before training says nothing about it
    assert (facts["rollout_success"], facts["rollout_iteration"]) == (0.3, 3)
    assert (facts["val_success"], facts["val_iteration"]) == (0.25, 0)
    assert (facts["pid"], facts["host"]) == (os.getpid(), socket.gethostname())
    assert [line.split()[1] for line in facts["log"]] == [str(n) for n in range(492, 500)]
    assert facts["logs"] == [{"name": "engine-0.log", "bytes": 1234}, {"name": "learner-1.log", "bytes": 0}]

    assert max(len(line) for line in text.splitlines()) == 80
    monkeypatch.delenv("COLUMNS")  # and not a terminal: a program reads it
    assert f"line 499 {'x' * 100}\n" in shown(capsys, "first")
    for line in (
        f"state      running, pid {os.getpid()} on {socket.gethostname()}\n",
        "iteration  3 of 10\n",
        " 1 min 40 s elapsed\n",
        "left       about 2 min 15 s, at 20.0 s per iteration\n",
        "success    30.0% in the rollout of iteration 3\n",
        "           25.0% evaluated before training\n",
        "  engine-0.log     1.2 kB\n",
    ):
        assert line in text
    assert "resume" not in text and "line 499 xxx" in text and "line 491" not in text


def test_a_run_whose_lock_is_free_has_died(runs, capsys):
    run = make_run("first")  # its pid is this process's, which lives: in a container pids repeat
    run.lock().close()
    facts = status_of(capsys, "runs/first")
    assert (facts["state"], facts["left_s"]) == ("died", None)
    assert facts["elapsed_s"] == pytest.approx(95)  # up to its last sign of life
    assert "state      died\n" in (text := shown(capsys, "first"))
    assert "resume     vlarl train --resume runs/first\n" in text


def test_a_run_that_another_process_resumes_has_not_died(runs, capsys):
    run = make_run("first", pid=dead_pid())
    with run.lock():
        assert status_of(capsys, "first")["state"] == "running"


def test_without_a_lock_the_pid_counts_on_its_own_host_alone(runs, capsys):
    make_run("alive")
    make_run("gone", pid=dead_pid())
    make_run("elsewhere", pid=dead_pid(), host="another-machine")
    assert {facts["run"]: facts["state"] for facts in status_of(capsys)} == {
        "alive": "running",
        "gone": "died",
        "elsewhere": "running",
    }


def test_looking_leaves_the_lock_to_others(runs, capsys):
    run = make_run("first")
    run.lock().close()
    assert run.is_locked() is False
    assert status_of(capsys, "first")["state"] == "died"
    run.lock().close()  # would be refused
    shutil.rmtree(run.path)
    assert run.is_locked() is None


@pytest.mark.parametrize("state", ["failed", "interrupted"])
def test_a_run_that_ended_early_says_why_and_how_to_go_on(runs, capsys, state):
    why = "VlarlError: iteration 3: the gradient was not finite in any of 8 steps, so the weights were left alone."
    run = make_run("first", state, message=why)
    run.log_file.write_text("")
    text = shown(capsys, "first")
    assert f"state      {state}\n" in text and "resume     vlarl train --resume runs/first\n" in text
    assert max(len(line) for line in text.splitlines()) <= 80 and why in " ".join(text.split())
    assert "left " not in text.replace("were left", "") and "train.log" not in text
    assert status_of(capsys, "first")["message"] == why


def test_a_finished_run(runs, capsys):
    make_run("first", "finished", iteration=10)
    text = shown(capsys, "first")
    assert "state      finished\n" in text and "iteration  10 of 10\n" in text
    assert "resume" not in text and "left" not in text and "pid" not in text


def test_supervised_runs_of_earlier_versions_can_not_be_resumed(runs, capsys):
    """Their status has no command, and their folder nothing that it would resume from."""
    run = RunDirectory.create("runs", "base")
    run.config_file.write_text("run: {}\ndemos: {}\n")
    run.write_status("failed", 20, 50, "ValueError: bad")
    assert status_of(capsys, "base")["resume"] == "vlarl finetune --resume runs/base"
    run.status_file.write_text(json.dumps(run.read_status() | {"resume": ""}))
    facts = status_of(capsys, "base")
    assert (facts["state"], facts["resume"], facts["message"]) == ("failed", "", "ValueError: bad")
    assert "resume" not in shown(capsys, "base")


def test_a_run_without_status_is_starting_or_has_died(runs, capsys):
    run = RunDirectory.create("runs", "first")
    run.config_file.write_text("run: {}\n")
    with run.lock():
        assert status_of(capsys, "first")["state"] == "starting"
    facts = status_of(capsys, "first")
    assert (facts["state"], facts["message"]) == ("died", "it has not written a status.json")
    assert "died   0/0        -    -    first" in shown(capsys)


def test_all_runs_a_line_each_newest_last(runs, capsys):
    for age, (name, state) in enumerate([("b", "failed"), ("a", "finished"), ("long_name" * 4, "interrupted")]):
        run = make_run(name, state, updated=time.time() - (3 - age) * 4000)
        os.utime(run.config_file, (1000 + age, 1000 + age))
    assert shown(capsys).splitlines() == [
        "state        iteration  val    ago  run",
        "failed       3/10       25.0%  3 h  b",
        "finished     3/10       25.0%  2 h  a",
        "interrupted  3/10       25.0%  1 h  " + "long_name" * 4,
    ]
    assert [facts["run"] for facts in status_of(capsys)] == ["b", "a", "long_name" * 4]
    shutil.move("runs", "others")
    assert status_of(capsys) == [] and len(status_of(capsys, "--run.root", "others")) == 3
    assert shown(capsys) == "no runs in runs/\n"


def test_unknown_runs_are_refused_with_near_names(runs, capsys):
    make_run("first", "finished")
    assert main(["status", "frist"]) == 2
    assert capsys.readouterr().err.startswith("error: no run 'frist'; did you mean 'first'?")


def test_files_that_are_half_written_or_odd_are_no_error(runs, capsys):
    run = make_run("first", "finished")
    run.metrics_file.write_text('{"iteration": 1, "rollout/success_rate": null}\n{"iteration": 2, "rollout/succ')
    run.log_file.write_bytes(b"\xff\xfe broken\n")
    facts = status_of(capsys, "first")
    assert (facts["iteration"], facts["rollout_success"], facts["val_success"]) == (3, None, None)
    assert facts["log"] == ["\ufffd\ufffd broken"]
    run.status_file.write_text("{")
    assert status_of(capsys, "first")["state"] == "unreadable"


@pytest.mark.parametrize(
    "content",
    [
        b"\xff{}",
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"state": "running", "iteration": "three"}',
        b'{"state": ["finished"]}',
        b'{"state": "finished", "updated": 1e300}',
        b'{"state": "finished", "started": "yesterday", "updated": true}',
        b'{"state": "running", "pid": 99999999999999999999}',
        b'{"state": "finished", "iteration": NaN}',
        b'{"state": "finished", "host": {}, "message": 7}',
        b'{"state": "exploded"}',
    ],
)
def test_a_damaged_status_is_named_and_the_other_runs_are_shown(runs, capsys, content):
    make_run("good", "finished")
    bad = make_run("bad", "finished")
    bad.status_file.write_bytes(content)
    lines = shown(capsys).splitlines()
    assert any(line.startswith("finished") and line.endswith("good") for line in lines)
    assert any(line.startswith("unreadable") and line.endswith("bad") for line in lines)
    assert "status.json is damaged" in shown(capsys, "bad")
    assert status_of(capsys, "good")["state"] == "finished"


@pytest.mark.parametrize(
    "row",
    [
        '{"iteration": "x", "rollout/success_rate": 0.5}',
        '{"iteration": -1, "rollout/success_rate": true, "time/iteration": "slow"}',
        '{"iteration": [], "val/success_rate": {}}',
        '{"iteration": 1, "val/success_rate": 1' + "0" * 400 + "}",
        '{"iteration": 1' + "0" * 5000 + "}",
        "[" * 100_000,
    ],
)
def test_odd_rows_of_metrics_are_passed_over(runs, capsys, row):
    make_run("good", "finished").metrics_file.write_text(row + "\n")
    assert status_of(capsys, "good")["iteration"] == 3 and "good" in shown(capsys)
