"""Calls with a deadline: results and errors come back, and what does not return is given up."""

import threading

import pytest

from vlarl.deadline import TimedCaller, call_in_time

pytestmark = pytest.mark.timeout(60)


def test_results_and_errors_come_back_from_one_thread():
    caller = TimedCaller("calls")
    first, second = (caller.call(threading.get_ident, 30) for _ in range(2))
    assert first == second != threading.get_ident()
    with pytest.raises(KeyError, match="x"):
        caller.call(lambda: {}["x"], 30)
    with pytest.raises(SystemExit):
        caller.call(lambda: exit(3), 30)
    assert caller.call(threading.get_ident, 30) == first, "an error does not cost the thread"


def test_what_does_not_return_is_given_up_and_the_next_call_has_a_thread_of_its_own():
    caller, release, ended = TimedCaller("calls"), threading.Event(), threading.Event()

    def hang() -> None:
        try:
            release.wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError, match=r"longer than 0.1 s"):
        caller.call(hang, 0.1)
    assert caller.call(lambda: 7, 30) == 7
    release.set()
    assert ended.wait(30)


def test_a_loop_without_end_ends_when_it_is_given_up():
    ended = threading.Event()

    def loop() -> None:
        try:
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        call_in_time(loop, 0.1)
    assert ended.wait(30)
