"""Ctrl-C and SIGTERM as requests: noted once, obeyed at once the second time, and given back afterwards."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from vlarl.interrupt import Interrupted, InterruptGuard

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@BOTH
def test_the_first_signal_requests_a_stop_and_the_second_interrupts(number):
    before = signal.getsignal(number)
    with InterruptGuard() as guard:
        guard.check()
        os.kill(os.getpid(), number)
        assert guard.requested
        with pytest.raises(Interrupted):
            guard.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


PROCESS = """
import sys, time
from vlarl.interrupt import Interrupted, InterruptGuard

with InterruptGuard() as guard:
    print("ready", flush=True)
    try:
        for _ in range(2000):
            guard.check()
            time.sleep(0.01)
    except Interrupted:
        print("saved", flush=True)
        sys.exit(130)
"""


@BOTH
def test_a_process_gets_to_save(number):
    process = subprocess.Popen([sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "saved\n")


def test_the_first_signal_prints_one_line_at_once():
    said, lines = threading.Event(), []

    def say(line: str) -> None:
        lines.append(line)
        said.set()

    with InterruptGuard(say) as guard:
        os.kill(os.getpid(), signal.SIGINT)
        assert said.wait(60) and "press Ctrl-C again" in lines[0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        guard.request()
    assert len(lines) == 1


def test_it_is_said_while_the_main_thread_writes():
    """A signal may come in the middle of a write, whose lock is not given to it a second time."""
    writing, said = threading.Lock(), threading.Event()

    def say(line: str) -> None:
        with writing:
            said.set()

    with InterruptGuard(say):
        with writing:
            os.kill(os.getpid(), signal.SIGINT)
        assert said.wait(60)


def test_another_thread_may_have_a_guard_without_signals():
    found: list[bool] = []

    def work() -> None:
        with InterruptGuard() as guard:
            guard.request()
            found.append(guard.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert found == [True]
