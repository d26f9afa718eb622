"""`--detach` with small programs in the place of training; tests/e2e/test_detached.py runs real training."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from vlarl.cli import configured, main
from vlarl.cli.detach import _Child, start
from vlarl.config import load_config, to_yaml
from vlarl.observability.run_dir import RunDirectory

HEAD = """
import os, signal, sys, time
from pathlib import Path
from vlarl.observability.run_dir import RunDirectory
folder = Path({folder!r})
Path({note!r}).write_text(str(os.getpid()))
print("loading", repr(sys.stdin.read()), flush=True)
"""
RUNS = """
run = RunDirectory.open(folder) if folder.exists() else RunDirectory.create(folder.parent, folder.name)
lock = run.lock()
run.write_status("running", 0, 3)
"""
STAYS = """
deadline = time.monotonic() + 300
while not (folder / "leave").exists() and time.monotonic() < deadline:
    time.sleep(0.02)
print("leaving", flush=True)
print("for good", file=sys.stderr, flush=True)
"""


class Programs:
    """Writes programs that stand for a run, and ends those that a test leaves behind."""

    def __init__(self, folder: Path) -> None:
        self.note = folder / "pid"
        self.folder = folder / "new" / "runs" / "first"

    def command(self, *parts: str) -> list[str]:
        text = "".join(parts).replace("{folder!r}", repr(str(self.folder))).replace("{note!r}", repr(str(self.note)))
        return [sys.executable, "-c", text]

    @property
    def pid(self) -> int:
        return int(self.note.read_text())

    def end(self) -> None:
        if self.note.exists():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    yield made
    made.end()


@pytest.fixture
def typed() -> Iterator[None]:
    """Input was typed into this process."""
    keyboard, hand = os.pipe()
    os.write(hand, b"typed")
    os.close(hand)
    before = os.dup(0)
    os.dup2(keyboard, 0)
    yield
    os.dup2(before, 0)
    os.close(before)
    os.close(keyboard)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".vlarl-output*")]


def test_the_run_goes_on_and_its_output_moves_with_it(programs, typed, tmp_path, capsys):
    folder = programs.folder
    assert start(programs.command(HEAD, RUNS, STAYS), folder) == 0
    pid, log = programs.pid, folder / "logs" / "output.log"
    assert capsys.readouterr().out.splitlines() == [
        f"starting {folder} …",
        f"run:    {folder}",
        f"pid:    {pid}",
        f"log:    {log}",
        f"status: vlarl status {folder}",
        f"stop:   kill -INT {pid}   (it saves first)",
    ]
    assert os.getsid(pid) == pid != os.getsid(0)
    assert log.read_text() == "loading ''\n"  # nothing to read from
    os.kill(pid, signal.SIGHUP)  # the terminal is closed
    (folder / "leave").touch()
    wait_for(lambda: log.read_text() == "loading ''\nleaving\nfor good\n")
    assert log.stat().st_mode == (folder / "status.json").stat().st_mode
    assert leftovers(tmp_path) == []


def test_a_run_that_is_refused_leaves_nothing(programs, tmp_path, capsys):
    refusal = "print('error: no such checkpoint', file=sys.stderr)\nsys.exit(2)\n"
    assert start(programs.command(HEAD, refusal), programs.folder) == 2
    captured = capsys.readouterr()
    assert captured.err == "loading ''\nerror: no such checkpoint\n"
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


def test_a_process_that_is_killed_while_it_starts(programs, tmp_path, capsys):
    killed = "os.kill(os.getpid(), signal.SIGKILL)\n"
    assert start(programs.command(HEAD, killed), programs.folder) == 128 + 9
    error = "error: the process was ended by SIGKILL before the run had started\n"
    assert capsys.readouterr().err == f"loading ''\n{error}"
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


def test_a_run_that_ends_at_once_shows_and_keeps_its_output(programs, tmp_path, capsys):
    fails = (
        "run = RunDirectory.create(folder.parent, folder.name)\nrun.write_status('failed', 0, 3)\nsys.exit('broke')\n"
    )
    assert start(programs.command(HEAD, fails), programs.folder) == 1
    assert capsys.readouterr().err == "loading ''\nbroke\n"
    assert (programs.folder / "logs" / "output.log").read_text() == "loading ''\nbroke\n"
    assert leftovers(tmp_path) == []


def test_a_resumed_run_keeps_the_output_of_its_earlier_sessions(programs, tmp_path):
    run = RunDirectory.create(programs.folder.parent, programs.folder.name)
    run.write_status("running", 0, 3)  # a session that died
    run.output_file.write_text("second\n")
    (run.logs / "output-1.log").write_text("first\n")
    assert start(programs.command(HEAD, RUNS, STAYS), run.path) == 0
    assert {path.name: path.read_text() for path in run.logs.iterdir()} == {
        "output-1.log": "first\n",
        "output-2.log": "second\n",
        "output.log": "loading ''\n",
    }
    assert leftovers(tmp_path) == []


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(programs, capsys):
    run = RunDirectory.create(programs.folder.parent, programs.folder.name)
    run.write_status("running", 0, 3)
    run.output_file.write_text("of the process that has the lock\n")
    before = sorted(run.path.rglob("*"))
    assert start(programs.command(HEAD, "sys.exit(2)"), run.path) == 2
    assert sorted(run.path.rglob("*")) == before
    assert run.output_file.read_text() == "of the process that has the lock\n"


def test_what_an_earlier_process_of_that_number_said_does_not_count(tmp_path):
    run = RunDirectory.create(tmp_path, "first")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run.write_status("running", 0, 3)
        saved = run.read_status()
        run.status_file.write_text(
            run.status_file.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {process.pid}')
        )
        assert _Child(process, run, since=saved["updated"] - 1).state() == "running"
        assert _Child(process, run, since=saved["updated"] + 1).state() is None
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_while_it_starts_ends_the_process_too(programs, tmp_path):
    command = programs.command(HEAD, "time.sleep(60)")
    program = f"from pathlib import Path; from vlarl.cli.detach import start; start({command!r}, Path({str(programs.folder)!r}))"
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    wait_for(lambda: programs.note.exists() and programs.note.read_text() != "" and leftovers(tmp_path) != [])
    parent.send_signal(signal.SIGINT)
    assert parent.wait(20) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(programs.pid, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


@pytest.fixture
def detached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Path, bool]]:
    """What would be started."""
    calls: list[tuple[list[str], Path, bool]] = []

    def record(arguments: list[str], folder: Path, is_new: bool) -> int:
        calls.append((arguments, folder, is_new))
        return 0

    monkeypatch.setattr("vlarl.cli.detach.detach", record)
    return calls


def test_the_same_command_is_started_under_the_name_that_was_found(detached, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configured.train(["tabletop_ppo", "--detach", "--seed", "3", "--run.root", "elsewhere"]) == 0
    ((arguments, folder, is_new),) = detached
    assert arguments == ["tabletop_ppo", "--seed", "3", "--run.root", "elsewhere", f"--run.name={folder.name}"]
    assert folder.name.startswith("tabletop_ppo_seed3_20") and folder.parent == tmp_path / "elsewhere" and is_new
    assert configured.train(["--run.name", "mine", "--detach"]) == 0
    assert detached[1] == (["--run.name", "mine", "--run.name=mine"], tmp_path / "runs/mine", True)


def test_a_resumed_run_needs_no_name(detached, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    Path("runs/first/config.yaml").write_text(to_yaml(load_config(overrides={"run.name": "first"})))
    assert configured.train(["--resume", "first", "--detach", "--run.iterations", "9"]) == 0
    assert detached == [(["--resume", "first", "--run.iterations", "9"], Path("runs/first"), False)]


def test_a_dry_run_stays_one(detached, capsys):
    assert configured.train(["--detach", "--dry-run"]) == 0
    assert detached == [] and "# derived" in capsys.readouterr().out


def test_mistakes_are_reported_at_once_and_nothing_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--detach", "--optim.lr", "-1", "--env.suite", "nowhere"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: 2 problems") and "optim.lr" in message and "env.suite" in message
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").write_text("run: {}")
    assert main(["train", "--detach", "--run.name", "first"]) == 2
    captured = capsys.readouterr()
    assert "exists already" in captured.err and captured.out == ""
    assert main(["finetune", "--detach"]) == 2
    assert "--detach: unknown option" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "first", "config.yaml"]
