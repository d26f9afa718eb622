"""`vlarl train … --detach`: the same command as a separate process, which continues when the terminal is closed.

    vlarl train … --detach                       python -m vlarl.cli train …
    ──────────────────────                       ───────────────────────────
    checks what can be checked without torch
    starts ───────────────────────────────────►  builds its parts, makes the run's folder
    waits for status.json of that process  ◄───  writes it: running
    moves the output to logs/output.log          continues, writing to the same file under its new name
    prints the run's paths, and returns

It waits as long as a model takes to load. If the process ends instead, its output is shown and its exit code returned.
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

from vlarl.config.paths import brief
from vlarl.observability.run_dir import RunDirectory, nearest_existing

POLL_S = 0.1
STOP_S = 30.0  # how long a process may take to end after SIGINT


def detach(arguments: Sequence[str], folder: Path, is_new: bool) -> int:
    """Start `vlarl train` with these arguments for the run in this folder; wait until it runs, and print its paths."""
    if is_new:
        RunDirectory.refuse_existing(folder.parent, folder.name)
    # -P like the `vlarl` program: no file in the working directory can shadow a package.
    return start([sys.executable, "-P", "-u", "-m", "vlarl.cli", "train", *arguments], folder)


def start(command: Sequence[str], folder: Path) -> int:
    """Start a command that makes or resumes the run in this folder, and wait until its status is running."""
    run = RunDirectory(folder)
    # On the disk of the run's folder, which does not exist yet, so that moving it does not disturb its writer.
    # Not in it: the folder of a run that never started must be empty to be used again.
    output = nearest_existing(folder.parent) / f".vlarl-output-{os.getpid()}.log"
    print(f"starting {brief(folder)} …", flush=True)
    with _ignoring_hangups():
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
    """The detached process and its run."""

    process: subprocess.Popen[bytes]
    run: RunDirectory
    since: float

    def wait_until_running(self) -> bool:
        """Whether the run is running; false if the process has ended."""
        while self.process.poll() is None:
            if self.state() == "running":
                return True
            time.sleep(POLL_S)
        return False

    def state(self) -> str | None:
        """The state that the process has written; None before it has written any."""
        status = self.run.read_status()
        # The status of an earlier session may have the same pid: in a container there are few.
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
        """Move the output into the run's logs, or delete it if no run started; return its text."""
        text = output.read_text(encoding="utf-8", errors="replace")
        if self.state() is None:
            output.unlink()
        else:
            _set_aside(self.run.output_file)
            output.rename(self.run.output_file)
        return text


@contextmanager
def _ignoring_hangups() -> Iterator[None]:
    """Closing the terminal while a large model loads ends neither the wait nor the run, which inherits the setting."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)


def _set_aside(path: Path) -> None:
    """Rename the output of an earlier session by appending an index."""
    index = 1
    while (numbered := path.with_stem(f"{path.stem}-{index}")).exists():
        index += 1
    if path.exists():
        path.rename(numbered)


def _report_end(process: subprocess.Popen[bytes], text: str) -> int:
    """Print the output of a process that has ended; return its exit code, by a shell's rules."""
    code = process.wait()
    print(text, end="", file=sys.stderr if code else sys.stdout)
    if code < 0:
        name = signal.Signals(-code).name
        print(f"error: the process was ended by {name} before the run had started", file=sys.stderr)
        return 128 - code
    return code


def _places(run: RunDirectory, pid: int) -> list[str]:
    places = {
        "run": brief(run.path),
        "pid": pid,
        "log": brief(run.output_file),
        "status": f"vlarl status {shlex.quote(brief(run.path))}",
        "stop": f"kill -INT {pid}   (it saves first)",
    }
    return [f"{name + ':':<8}{value}" for name, value in places.items()]
