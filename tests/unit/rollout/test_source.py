"""RolloutSource ahead of the update: how far, who waits for whom, how errors arrive, and that the thread ends.

What must not happen is given a second to happen: a slow machine makes such a test milder, never red.
"""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from vlarl.interrupt import Interrupted, InterruptGuard
from vlarl.rollout.source import RolloutsAhead, RolloutsInTurn, RolloutSource
from vlarl.types import Rollout

LIMIT_S = 20.0  # for what must happen
A_WHILE_S = 1.0  # for what must not


def rollout(iteration: int) -> Rollout:
    return Rollout(iteration, (), (), {}, {}, {}, {})


class Collecting:
    """Stands in for the collection of rollouts: notes which began and ended, and can be held up in each of them."""

    def __init__(self, guard: InterruptGuard) -> None:
        self.began: list[int] = []
        self.ended: list[int] = []
        self.guard = guard
        self.go_on = threading.Event()
        self.go_on.set()
        self.obeys = True
        self.error: BaseException | None = None

    def __call__(self, iteration: int) -> Rollout:
        self.began.append(iteration)
        end = time.monotonic() + LIMIT_S
        while not self.go_on.wait(0.01):
            if self.obeys:
                self.guard.check()  # as the collector does after each episode
            assert time.monotonic() < end
        if self.error is not None:
            raise self.error
        self.ended.append(iteration)
        return rollout(iteration)


def becomes(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture
def guard() -> InterruptGuard:
    return InterruptGuard()


@pytest.fixture
def collecting(guard: InterruptGuard) -> Iterator[Collecting]:
    work = Collecting(guard)
    yield work
    work.go_on.set()


def ahead(collecting: Collecting, num_iterations: int = 20, max_staleness: int = 1) -> RolloutsAhead:
    return RolloutsAhead(collecting, range(1, num_iterations + 1), max_staleness, collecting.guard)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_rollouts_are_ahead_by_the_staleness_and_no_more(collecting, max_staleness):
    """Rollout i begins once update i - 1 - max_staleness is done, and not before."""
    with ahead(collecting, max_staleness=max_staleness) as source:
        for done in range(4):
            allowed = done + max_staleness + 1
            assert becomes(lambda allowed=allowed: len(collecting.ended) == allowed)
            assert not becomes(lambda allowed=allowed: len(collecting.began) > allowed, A_WHILE_S / 4)
            assert source.get(done + 1).iteration == done + 1
            assert not becomes(lambda allowed=allowed: len(collecting.began) > allowed, A_WHILE_S / 4), (
                "got, and not updated on"
            )
            source.updated()
    assert collecting.began == sorted(collecting.began)


def test_a_loop_gets_every_rollout_in_order(collecting):
    with ahead(collecting, num_iterations=6) as source:
        for iteration in range(1, 7):
            assert source.get(iteration).iteration == iteration
            source.updated()
    assert collecting.ended == [1, 2, 3, 4, 5, 6]


def test_a_pause_waits_for_the_rollout_under_way_and_keeps_the_next_from_beginning(collecting):
    collecting.go_on.clear()
    with ahead(collecting, max_staleness=3) as source:
        assert becomes(lambda: collecting.began == [1])
        rested: list[list[int]] = []

        def evaluate() -> None:
            with source.paused():
                rested.append(list(collecting.ended))
                begun = len(collecting.began)
                rested.append(collecting.began[len(collecting.ended) :])  # those under way
                assert not becomes(lambda: len(collecting.began) > begun, A_WHILE_S)
                rested.append([])

        evaluation = threading.Thread(target=evaluate)
        evaluation.start()
        assert not becomes(lambda: bool(rested), A_WHILE_S), "the rollout is not finished yet"
        collecting.go_on.set()
        evaluation.join(LIMIT_S)
        assert len(rested) == 3 and 1 in rested[0] and rested[1] == []
        assert becomes(lambda: collecting.ended == [1, 2, 3, 4]), "afterwards they continue"


def test_an_error_of_the_thread_arrives_after_the_rollouts_before_it(collecting):
    class BrokenSimulatorError(Exception):
        pass

    with ahead(collecting, max_staleness=1) as source:
        assert becomes(lambda: collecting.ended == [1, 2])
        collecting.error = BrokenSimulatorError("it broke")
        assert source.get(1).iteration == 1
        source.updated()
        assert source.get(2).iteration == 2
        with pytest.raises(BrokenSimulatorError, match="it broke"):
            source.get(3)


def test_a_request_to_stop_ends_the_wait_for_a_rollout(collecting, guard):
    """Also while no episode ends, after which the collector would notice the request itself."""
    collecting.obeys = False
    collecting.go_on.clear()
    with ahead(collecting) as source:
        assert becomes(lambda: collecting.began == [1])
        guard.request()
        with pytest.raises(Interrupted):
            source.get(1)
        collecting.go_on.set()


class EndedThread(RolloutsAhead):
    """Its thread dies without a word, as one that the interpreter gave up on."""

    def _run(self) -> None:
        pass


def refusal_of(source: RolloutsAhead, iteration: int) -> str:
    """What `get` raises; it must do so in time."""
    found: list[str] = []

    def call() -> None:
        try:
            source.get(iteration)
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return found[0] if found else "it hangs"


def test_a_thread_that_has_ended_is_not_waited_for(collecting):
    with EndedThread(collecting, range(1, 5), 1, collecting.guard) as source:
        assert "ended without a rollout 1" in refusal_of(source, 1)
    with ahead(collecting, num_iterations=2) as source:
        assert becomes(lambda: not any(thread.name == "rollout" for thread in threading.enumerate()))
        assert [source.get(n).iteration for n in (1, 2)] == [1, 2], "what it left is still there"
        assert "ended without a rollout 3" in refusal_of(source, 3)


@pytest.mark.parametrize("moment", ["waiting for permission", "collecting"])
def test_leaving_ends_the_thread(collecting, moment):
    collecting.go_on.clear()
    started = time.monotonic()
    with ahead(collecting, max_staleness=0):
        assert becomes(lambda: collecting.began == [1])
        if moment == "waiting for permission":
            collecting.go_on.set()
            assert becomes(lambda: collecting.ended == [1])
    assert [t for t in threading.enumerate() if t.name == "rollout"] == []
    assert collecting.began == [1], "nothing else was begun"
    assert time.monotonic() - started < LIMIT_S


def test_leaving_by_an_error_ends_the_thread_too(collecting):
    collecting.go_on.clear()
    with pytest.raises(ZeroDivisionError), ahead(collecting):
        assert becomes(lambda: collecting.began == [1])
        raise ZeroDivisionError
    assert [t for t in threading.enumerate() if t.name == "rollout"] == []


def test_in_turn_nothing_is_collected_before_it_is_wanted(collecting):
    source: RolloutSource
    with RolloutsInTurn(collecting) as source:
        assert collecting.began == []
        assert source.get(1).iteration == 1
        source.updated()
        with source.paused():
            assert collecting.began == [1]


@pytest.mark.parametrize("kind", ["in turn", "ahead"])
def test_rollouts_wait_until_their_update_is_due(collecting, trajectory, kind):
    """In the order of the rollouts, each one once, and without what was left out of a rollout."""
    source: RolloutSource = RolloutsInTurn(collecting) if kind == "in turn" else ahead(collecting)
    episodes = [trajectory([[1]], seed=seed) for seed in range(5)]

    def collected(*kept: int) -> Rollout:
        return Rollout(1, tuple(episodes), tuple(episodes[index] for index in kept), {}, {}, {}, {})

    assert source.gather(collected(3, 0), update_due=False) == [] and source.num_waiting == 2
    assert source.gather(collected(), update_due=False) == [] and source.num_waiting == 2
    assert source.gather(collected(1), update_due=True) == [episodes[3], episodes[0], episodes[1]]
    assert source.num_waiting == 0
    assert source.gather(collected(4), update_due=True) == [episodes[4]]
