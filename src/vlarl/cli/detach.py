"""`vlarl train … --detach`: the same command as a process of its own, which goes on when the terminal is closed.

    vlarl train … --detach                       python -m vlarl.cli train …
    ──────────────────────                       ───────────────────────────
    checks what can be checked without torch
    starts ───────────────────────────────────►  builds its parts, makes the run's folder
    waits for status.json of that process  ◄───  writes it: running
    moves the output to logs/output.log          goes on, writing to the same file under its new name
    says where everything is, and returns

It waits as long as a model takes to load. If the process ends instead, its output is shown and its exit code is ours.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vlarl.config.words import brief_path
from vlarl.observability.run_dir import RunDirectory, nearest_existing

POLL_S = 0.1
STOP_S = 30.0  # how long a process that is no longer wanted may take to end


def detach(arguments: Sequence[str], folder: Path, is_new: bool) -> int:
    """Start `vlarl train` with these arguments for the run in this folder; wait until it goes on, and say where."""
    if is_new:
        RunDirectory.refuse_existing(folder.parent, folder.name)
    # -P as the `vlarl` program has it: nothing in the folder it is called from stands in for a package.
    return start([sys.executable, "-P", "-u", "-m", "vlarl.cli", "train", *arguments], folder)


def start(command: Sequence[str], folder: Path) -> int:
    """Start a command that makes or resumes the run in this folder, and wait for it to say that it is running."""
    run = RunDirectory(folder)
    # On the disk of the run's folder, which is not there yet, so that moving it leaves its writer undisturbed.
    output = nearest_existing(folder) / f".vlarl-output-{os.getpid()}.log"
    print(f"starting {brief_path(folder)} …", flush=True)
    with _deaf_to_hangups():
        since = time.time()
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        child = _Child(process, run, since)
        try:
            is_running = child.wait_until_running()
        except KeyboardInterrupt:
            child.stop()
            raise
        finally:
            text = child.put_away(output)
    if not is_running:
        return _report_end(process, text)
    print("\n".join(_places(run, process.pid)))
    return 0


@dataclass(frozen=True)
class _Child:
    """The detached process and the run it is to begin."""

    process: subprocess.Popen[bytes]
    run: RunDirectory
    since: float

    def wait_until_running(self) -> bool:
        """Whether the run goes on; false when the process has ended."""
        while self.process.poll() is None:
            if self.state() == "running":
                return True
            time.sleep(POLL_S)
        return False

    def state(self) -> str | None:
        """What the process says of its run; None before it says anything."""
        status = self.run.read_status()
        # What an earlier session left may bear the same pid: in a container there are few.
        is_its_own = status.get("pid") == self.process.pid and float(status.get("updated") or 0) >= self.since
        return str(status.get("state")) if is_its_own else None

    def stop(self) -> None:
        """End the process as Ctrl-C would."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def put_away(self, output: Path) -> str:
        """Move the output into the run's logs, or take it away where no run began; what it says so far."""
        text = output.read_text(encoding="utf-8", errors="replace")
        if self.state() is None:
            output.unlink()
        else:
            _set_aside(self.run.output_file)
            output.rename(self.run.output_file)
        return text


@contextmanager
def _deaf_to_hangups() -> Iterator[None]:
    """A terminal that is closed while a large model loads ends neither the wait nor, as it is passed on, the run."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)


def _set_aside(path: Path) -> None:
    """Give the output of an earlier session a number."""
    number = 1
    while (numbered := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    if path.exists():
        path.rename(numbered)


def _report_end(process: subprocess.Popen[bytes], text: str) -> int:
    """Show what a process that is no longer there has said; its exit code, by a shell's rules."""
    code = process.wait()
    print(text, end="", file=sys.stderr if code else sys.stdout)
    if code < 0:
        name = signal.Signals(-code).name
        print(f"error: the process was ended by {name} before the run was under way", file=sys.stderr)
        return 128 - code
    return code


def _places(run: RunDirectory, pid: int) -> list[str]:
    places = {
        "run": brief_path(run.path),
        "pid": pid,
        "log": brief_path(run.output_file),
        "status": f"vlarl status {shlex.quote(brief_path(run.path))}",
        "stop": f"kill -INT {pid}   (it saves first)",
    }
    return [f"{name + ':':<8}{value}" for name, value in places.items()]
