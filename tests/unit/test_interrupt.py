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
def test_the_first_signal_asks_and_the_second_interrupts(number):
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
