"""What the program answers to a command line, in this process or in one of its own, and what may be held against it."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fuzz.harness import MARKER, Case, Defect, living

import vlarl

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = Path(vlarl.__file__).resolve().parent
MODULES = os.pathsep.join([str(TESTS), str(PACKAGE.parent)])
"""PYTHONPATH of runs: the vlarl that is attacked, and these modules for their environments and rewards."""

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
GRACE_S = 10.0  # for processes of a run to end after it


@dataclass(frozen=True)
class Answer:
    """What came of a command line."""

    code: object  # the exit code; anything else where the program raised
    out: str
    err: str
    raised: str = ""  # the traceback of what was raised

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.out + self.err


def ask(arguments: Sequence[str], folder: Path) -> Answer:
    """Run the program in this process, called from the folder."""
    from vlarl.cli import main

    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    raised = ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as stop:  # argparse refuses so
            code = stop.code
        except BaseException:  # noqa: BLE001 - whatever leaves the program is a traceback to its user
            raised = traceback.format_exc()
    return Answer(code, out.getvalue(), err.getvalue(), raised)


def ask_process(
    arguments: Sequence[str], folder: Path, deadline_s: float, case: Case, **variables: str
) -> Answer | Defect:
    """Run the program as a process, called from the folder; one that misses the deadline is a hang."""
    process = start(arguments, folder, case, **variables)
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        stacks = _stacks(process)
        return Defect("hang", f"`vlarl {' '.join(arguments)}` took more than {deadline_s:g} s\n{stacks}")
    return Answer(process.returncode, out, err)


def start(arguments: Sequence[str], folder: Path, case: Case, **variables: str) -> subprocess.Popen[str]:
    """Start the program as a process, in this case's name."""
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", PROGRAM, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": MODULES, "OMP_NUM_THREADS": "1", MARKER: case.marker, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


PROGRAM = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1)
from vlarl.cli import main
sys.exit(main())
"""


def _stacks(process: subprocess.Popen[str]) -> str:
    """Where a process that hangs is; it is killed."""
    process.send_signal(signal.SIGUSR1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # children that hold the pipe keep it open
        out, err = process.communicate(timeout=2.0)
        return out + err
    return "(its output is held open by a child)"


def judged(answer: Answer, allowed: Sequence[int] = (DONE, REFUSED), what: str = "") -> list[Defect]:
    """What is wrong with an answer whatever was asked: a traceback, another exit code, no message."""
    if answer.raised:
        return [Defect("traceback", f"{what}\n{answer.raised}")]
    if "Traceback (most recent call last)" in answer.text:
        return [Defect("traceback", f"{what}\n{answer.text}")]
    if answer.code not in allowed:
        return [Defect("wrong", f"{what}: exit code {answer.code!r}, expected one of {list(allowed)}\n{answer.text}")]
    if answer.code in (FAILED, REFUSED) and "error: " not in answer.err:
        return [Defect("wrong", f"{what}: exit code {answer.code} without a message\n{answer.text}")]
    return []


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; links, pipes and empty folders by their names."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file():
            found[name] = path.read_bytes()
        elif path.is_symlink() or not path.is_dir() or not any(path.iterdir()):
            found[name] = b""
    return found


def litter(folder: Path, expected: Sequence[str]) -> list[Defect]:
    """Files that were left in a folder that a command was called from."""
    left = [path.name for path in folder.iterdir() if path.name not in expected]
    return [Defect("wrong", f"left in the working folder: {', '.join(sorted(left))}")] if left else []


def left_behind(case: Case, grace_s: float = GRACE_S) -> list[Defect]:
    """Processes of a case that outlive it; they are ended."""
    limit = time.monotonic() + grace_s
    while (found := living(case.marker)) and time.monotonic() < limit:
        time.sleep(0.05)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not found:
        return []
    named = "\n".join(f"{pid}: {command}" for pid, command in found.items())
    return [Defect("wrong", f"processes that outlive the run:\n{named}")]
