"""Nothing outlives its trainer: simulators that can't notice, and whatever they have started.

Each process holds a pipe open for as long as it lives, so that the end of the pipe is the end of all of them.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fakes.processes import MODULES
from fakes.worker_envs import CountingFactory

from vlarl.envs.guardian import Guardian, run_watched
from vlarl.envs.process_pool import WorkerPool
from vlarl.types import Task

pytestmark = pytest.mark.timeout(60)


def sleeper(pipe: int) -> subprocess.Popen:
    """A process with a group of its own, and a child in it; both hold the pipe."""
    return subprocess.Popen(["sh", "-c", "sleep 600 & wait"], pass_fds=(pipe,), start_new_session=True)


def test_what_is_watched_ends_with_the_pipe_and_what_is_forgotten_does_not():
    ours, theirs = os.pipe()
    other, others = os.pipe()
    guardian, watched, forgotten = Guardian(), sleeper(theirs), sleeper(others)
    os.close(theirs)
    os.close(others)
    os.kill(watched.pid, signal.SIGSTOP)
    for process in (watched, forgotten):
        guardian.watch(process.pid)
    guardian.forget(forgotten.pid)
    guardian.close()
    assert os.read(ours, 1) == b"", "a stopped process and its child are gone"
    assert watched.wait() == -signal.SIGKILL and forgotten.poll() is None
    os.killpg(forgotten.pid, signal.SIGKILL)
    assert os.read(other, 1) == b"" and forgotten.wait() == -signal.SIGKILL
    guardian.close()


def test_it_ends_what_it_watches_when_another_owner_dies_first():
    ours, theirs = os.pipe()
    owner = subprocess.Popen(["sleep", "600"])
    with Guardian([owner.pid]) as guardian:
        watched = sleeper(theirs)
        os.close(theirs)
        guardian.watch(watched.pid)
        assert watched.poll() is None
        owner.kill()
        owner.wait()
        assert os.read(ours, 1) == b"" and watched.wait() == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_with_a_session_of_its_own_ends_too(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    start = "import subprocess; subprocess.Popen(['sleep', '600'], stdout=open(PIPE, 'w'), start_new_session=True)"
    with (tmp_path / "log").open("w+b") as log:
        command = [sys.executable, "-c", start.replace("PIPE", repr(str(pipe)))]
        assert run_watched(command, log, os.environ, timeout_s=60) == 0
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_program_that_takes_too_long_ends_with_its_children(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    command = ["sh", "-c", f"exec 3>{pipe}; sleep 600 & wait"]
    with (tmp_path / "log").open("w+b") as log, pytest.raises(subprocess.TimeoutExpired):
        run_watched(command, log, os.environ, timeout_s=2)
    assert os.read(reader, 1) == b""
    os.close(reader)
    with (tmp_path / "log").open("w+b") as log:
        assert run_watched(["sh", "-c", "exit 3"], log, os.environ, timeout_s=60) == 3


TRAINER = """
import sys, numpy, threading
from fakes.worker_envs import CountingFactory
from vlarl.envs.process_pool import WorkerPool
from vlarl.types import Task

def make():
    global pool
    pool = WorkerPool(CountingFactory((("child", 0), ("hold the GIL", 1), ("hang", 2)), sys.argv[1]), 2)
    pool.reset([0, 1], [Task("counting", 0, 0, 0)] * 2)

if sys.argv[2] == "thread":  # one that ends before the process does: the workers must not end with it
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
else:
    make()
pool.send_chunk([0], numpy.ones((1, 1, 2), numpy.float32))
print(*pool.pids, flush=True)
sys.stdin.read()
print([outcome.error for outcome in pool.receive_all([1])], flush=True)
"""


@pytest.mark.parametrize("made_in", ["main", "thread"])
def test_workers_and_their_children_end_with_a_trainer_that_is_killed(tmp_path, made_in):
    """One holds the GIL, one is stopped; each has a child that would sleep on."""
    diary = tmp_path / "diary"
    os.mkfifo(f"{diary}.pipe")
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(diary), made_in],
        env={**os.environ, "PYTHONPATH": MODULES},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with Path(f"{diary}.pipe").open("rb") as pipe:  # opens once a worker has opened it
        assert trainer.stdout is not None
        first, second = map(int, trainer.stdout.readline().split())
        os.kill(second, signal.SIGSTOP)
        trainer.kill()
        trainer.communicate()
        assert pipe.read() == b"", "all four have ended"
    assert not any(Path(f"/proc/{pid}/cmdline").is_file() and _cmdline(pid) for pid in (first, second))


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()  # empty: it is dead, and its new parent has not noticed yet
    except OSError:
        return b""


def test_a_worker_that_is_replaced_or_closed_takes_its_children_along(tmp_path):
    diary = tmp_path / "diary"
    os.mkfifo(f"{diary}.pipe")
    reader = os.open(f"{diary}.pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    pool = WorkerPool(CountingFactory((("child", 0), ("die", 1)), str(diary)), 1)
    pool.reset([0], [Task("counting", 0, 0, 0)])
    (outcome,) = pool.step_chunk([0], np.ones((1, 1, 2), np.float32))
    assert "SIGKILL" in str(outcome.error)
    assert os.read(reader, 1) == b"", "the child of a worker that died is killed when it is replaced"
    pool.reset([0], [Task("counting", 0, 0, 0)])
    pool.close()
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_what_an_environment_says_without_end_is_cut(tmp_path):
    pool = WorkerPool(CountingFactory((("say much", 1),), str(tmp_path / "diary")), 1)
    try:
        pool.reset([0], [Task("counting", 0, 0, 0)])
        (outcome,) = pool.step_chunk([0], np.ones((1, 1, 2), np.float32))
    finally:
        pool.close()
    assert "ArithmeticError: xxx" in str(outcome.error) and "characters left out" in str(outcome.error)
    assert len(str(outcome.error)) < 25_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_guardian_inside_what_another_one_watches_is_left_to_do_its_work(monkeypatch):
    with Guardian() as outer:
        monkeypatch.setenv(*next(iter(outer.variables.items())))  # as in a process that it watches
        with Guardian() as inner:
            environment = Path(f"/proc/{inner.pid}/environ").read_bytes()
            assert next(iter(outer.variables.values())).encode() not in environment
