"""Ends the simulators of a trainer that has died, however it died: a small process with a list of process groups.

    trainer ── "+123\\n": watch this group; "-123\\n": it has ended ──► guardian
            ── the end of the pipe, or of the trainer ──────────────► guardian: SIGKILL to each group that is left

A simulator has a session of its own, so its process group contains everything it starts. A simulator that holds the
GIL or is stopped can't notice that its trainer is gone; the guardian, which does nothing else, can. It waits
only for an inherited pipe and its owners.

A process that an environment moves into yet another session is outside that group. An environment variable, which
Linux shows in /proc, marks it, and the guardian kills it when it ends.

The trainer starts this file as a program: it must import nothing but the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

PR_SET_PDEATHSIG = 1  # linux/prctl.h
CLOSE_S = 5.0
VARIABLE = "VLARL_GUARDIAN"
PASSES = 20


class Guardian:
    """The trainer's side: starts the process and sends it the groups to watch. `close` ends those still watched."""

    def __init__(self, owners: Sequence[int] = ()) -> None:
        """The groups end with this process, or with any of the `owners`."""
        read_end, self._pipe = os.pipe()
        mark = uuid.uuid4().hex
        self.variables = {VARIABLE: mark}  # for the environment of each process that is watched
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(read_end), mark, *map(str, (os.getpid(), *owners))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(read_end,),
                cwd="/",
                env={
                    name: value for name, value in os.environ.items() if name != VARIABLE
                },  # it must outlive an outer guardian
                start_new_session=True,
            )
        finally:
            os.close(read_end)

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def watch(self, group: int) -> None:
        """End this process group when an owner dies."""
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """This process group has ended: its id may be reused."""
        self._send(f"-{group}\n")

    def close(self) -> None:
        """End the process, and all groups that it still watches."""
        if self._pipe < 0:
            return
        os.close(self._pipe)
        self._pipe = -1
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, line: str) -> None:
        with suppress(BrokenPipeError):  # the guardian was killed: the trainer still ends what it started
            os.write(self._pipe, line.encode())


def run_watched(command: Sequence[str], output: IO[bytes], environment: Mapping[str, str], timeout_s: float) -> int:
    """Run a program and return its exit code; it and its children end with this process, or at the time limit.

    Raises subprocess.TimeoutExpired.
    """
    with Guardian() as guardian:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, **guardian.variables},
            start_new_session=True,
        )
        guardian.watch(process.pid)
        try:
            return process.wait(timeout_s)
        finally:
            kill_group(process.pid)
            process.wait()


def kill_group(group: int) -> None:
    """Kill all processes of a group, if it still exists."""
    with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group that has just ended
        os.killpg(group, signal.SIGKILL)


def end_with_parent() -> None:
    """Let the system kill this process when the thread that started it ends (Linux only).

    That thread must live as long as its process.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Watch until an owner or the pipe ends, then kill what is left."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    pipe, mark, owners = int(sys.argv[1]), sys.argv[2], [int(pid) for pid in sys.argv[3:]]
    os.set_blocking(pipe, False)
    groups: set[int] = set()
    ends: list[int] = []
    try:
        if hasattr(os, "pidfd_open"):  # without it only the end of the pipe shows
            ends = [os.pidfd_open(pid) for pid in owners]
        rest = b""
        while not select.select([*ends], [], [], 0)[0]:
            ready, _, _ = select.select([pipe, *ends], [], [])
            if pipe in ready:
                content = os.read(pipe, 65536)
                if not content:
                    break
                *lines, rest = (rest + content).split(b"\n")
                _note(lines, groups)
    except ProcessLookupError:  # an owner died before it could be watched
        pass
    with suppress(BlockingIOError):
        _note(os.read(pipe, 65536).split(b"\n"), groups)
    for group in groups:
        kill_group(group)
    kill_marked(mark)


def kill_marked(mark: str) -> None:
    """Kill all processes that inherited the mark (Linux only), and those that they start meanwhile."""
    wanted = f"{VARIABLE}={mark}".encode()
    for _ in range(PASSES):
        found = [pid for pid in _processes() if wanted in _environment(pid)]
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _processes() -> list[int]:
    with suppress(FileNotFoundError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return []


def _environment(pid: int) -> list[bytes]:
    """The variables that a process was started with; none if it has ended or is another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _note(lines: list[bytes], groups: set[int]) -> None:
    for line in filter(None, lines):
        (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))


if __name__ == "__main__":
    main()
