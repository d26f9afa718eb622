"""Rollouts in a stream: who waits for whom, pauses, what a resumed run begins with, errors, and that the threads end.

With the real collector, and environments that end when the test wants. What must not happen is given a moment to
happen: a slow machine makes such a test milder, never red.
"""

import json
import random
import threading
import time

import pytest
from fakes.streaming import A_WHILE_S, LIMIT_S, Stream, becomes, groups_of, key, threads

from vlarl.config.schema import Config
from vlarl.envs.base import SuiteSpec, TaskSpec
from vlarl.errors import VlarlError
from vlarl.interrupt import Interrupted
from vlarl.rollout.ahead import RolloutsAhead, StreamedTasks
from vlarl.rollout.epochs import EpochSampler
from vlarl.rollout.statistics import staleness_metrics
from vlarl.types import Rollout, Task


class BrokenError(Exception):
    """Of a part that the test breaks."""


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert threads() == []


def in_thread(call) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_an_update_does_not_wait_for_the_slowest_until_the_bound_demands_it():
    """Group 1/0 has a slow member: the first update is on others, the second one, a version later, waits for it."""
    stream = Stream(num_envs=3)
    stream.pool.is_held = lambda task: key(task) == (1, 0, 1)
    with stream.open() as source:
        begun: list[Rollout] = []
        in_thread(lambda: begun.append(source.get(1))).join(LIMIT_S)
        (first,) = begun
        assert groups_of(first.kept) == [(1, 1), (2, 0)]
        assert first.metrics["rollout/groups_unfinished"] >= 1
        assert first.metrics["rollout/waited_for_stragglers_s"] == 0
        assert becomes(lambda: (2, 1, 1) in stream.scored)
        stream.update(source)
        assert becomes(lambda: (3, 1, 1) in stream.scored), "new groups are admitted, and enough of them wait"
        got: list[Rollout] = []
        loop = in_thread(lambda: got.append(source.get(2)))
        assert not becomes(lambda: bool(got), A_WHILE_S)
        stream.pool.is_held = lambda task: False
        loop.join(LIMIT_S)
        assert groups_of(got[0].kept) == [(1, 0), (2, 1)], "all of version 0, the oldest first"
        assert got[0].metrics["rollout/waited_for_stragglers_s"] >= 0.9 * A_WHILE_S
        assert got[0].metrics["rollout/groups_waiting"] == 2


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_rollouts_are_ahead_by_the_staleness_and_no_more(max_staleness):
    """Batch i is admitted once update i - 1 - max_staleness is done, and not before."""
    stream = Stream(max_staleness=max_staleness)
    with stream.open() as source:
        for done in range(3):
            allowed = list(range(1, done + max_staleness + 2))
            assert becomes(lambda a=allowed: len(stream.scored) == 4 * len(a))
            assert stream.sampler.batches == allowed
            source.get(done + 1)
            assert not becomes(lambda a=allowed: stream.sampler.batches != a, A_WHILE_S / 3), "got, and not updated on"
            stream.update(source)


@pytest.mark.parametrize(
    ("max_staleness", "num_groups", "group_size", "num_envs"), [(1, 2, 2, 3), (2, 3, 2, 8), (1, 1, 3, 2), (3, 2, 1, 5)]
)
def test_slow_and_fast_episodes_stay_within_the_bound(max_staleness, num_groups, group_size, num_envs):
    """By the versions that the decisions themselves have."""
    rng = random.Random(max_staleness)
    stream = Stream(num_envs, max_staleness, 10, num_groups=num_groups, group_size=group_size)
    lengths: dict[tuple[int, int, int], int] = {}
    stream.pool.length = lambda task: lengths.setdefault(key(task), rng.choice([1, 1, 1, 30]))
    trained: list[tuple[int, int]] = []
    oldest = []
    with stream.open() as source:
        for iteration in range(1, 11):
            rollout = source.get(iteration)
            assert all(len(t.transitions) == lengths[key(t.task)] for t in rollout.kept), "episodes are whole"
            groups = groups_of(rollout.kept)
            assert len(rollout.kept) == group_size * len(groups) and len(groups) >= num_groups
            trained += groups
            oldest.append(staleness_metrics(rollout.kept, stream.engine.version)["train/staleness_max"])
            time.sleep(rng.choice([0, 0.01]))  # the update
            stream.update(source)
    assert max(oldest) <= max_staleness and max(oldest) > 0
    left = [(row["batch"], row["group"]) for row in rollout.open_episodes["groups"]]
    assert sorted(trained + left) == [(b, g) for b in stream.sampler.batches for g in range(num_groups)]
    assert len(left) < num_groups
    assert sorted(stream.sampler.reported) == sorted((*group, m) for group in trained for m in range(group_size))


def test_a_pause_waits_for_episodes_under_way_and_lets_none_begin():
    stream = Stream(num_envs=2, max_staleness=3)
    stream.pool.is_held = lambda task: task.member == 1
    with stream.open() as source:
        assert becomes(lambda: stream.pool.running() == {(1, 0, 1), (1, 1, 1)})
        log: list[object] = []

        def evaluate() -> None:
            with source.paused():
                log.append(sorted(stream.pool.ended))
                log.append(stream.pool.running())
                scored = len(stream.scored)
                assert not becomes(lambda: bool(stream.pool.running()), A_WHILE_S)
                log.append(len(stream.scored) - scored)

        loop = in_thread(evaluate)
        assert not becomes(lambda: bool(log), A_WHILE_S), "two episodes are not finished yet"
        stream.pool.is_held = lambda task: False
        loop.join(LIMIT_S)
        assert log == [[(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)], set(), 0]
        assert becomes(lambda: len(stream.pool.ended) == 16), "afterwards the tasks that wait are run"
        source.get(1)
        assert stream.seconds[0]["rollout"] < time.monotonic()


def test_a_pause_waits_for_the_reward_and_is_left_out_of_the_collection_time():
    stream = Stream()
    at_work, go_on = threading.Event(), threading.Event()

    def scoring(episodes, check):
        at_work.set()
        assert go_on.wait(LIMIT_S)
        return episodes

    stream.scoring = scoring
    with stream.open() as source:
        paused = threading.Event()
        ended: list[float] = []

        def evaluate() -> None:
            with source.paused():
                paused.set()
                time.sleep(2 * A_WHILE_S)
            ended.append(time.monotonic())

        began = time.monotonic()
        assert at_work.wait(LIMIT_S)
        loop = in_thread(evaluate)
        assert not paused.wait(A_WHILE_S), "the reward is used by evaluations, too"
        go_on.set()
        loop.join(LIMIT_S)
        source.get(1)
        assert ended and stream.seconds[0]["rollout"] < time.monotonic() - began - 2 * A_WHILE_S + 0.1
        assert stream.seconds[0]["reward"] >= 0.9 * A_WHILE_S


def test_a_resumed_run_begins_with_the_groups_that_were_outstanding_then_with_the_next_batch():
    stream = Stream(num_envs=3)
    stream.pool.is_held = lambda task: key(task) == (1, 0, 1)
    with stream.open() as source:
        rollout = source.get(1)
    state = json.loads(json.dumps(rollout.open_episodes))
    trained = groups_of(rollout.kept)
    resumed = Stream(num_envs=3, iterations=2, state=state)
    resumed.engine.version = 1
    with resumed.open() as source:
        assert becomes(lambda: len(resumed.pool.began) >= 4)
        assert {each[:2] for each in resumed.pool.began[:4]} == {(1, 0), (2, 1)}
        for iteration in (2, 3):
            trained += groups_of(source.get(iteration).kept)
            resumed.update(source)
    assert sorted(trained) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert resumed.sampler.batches == [3], "a batch after those that were begun, and no more than can be trained on"


def test_samples_of_a_dataset_come_once_an_epoch_also_ahead_of_reports_and_across_a_resume():
    spec = SuiteSpec("fake", (TaskSpec(0, "it", 1),), tuple(range(12)), (12,), (12,), 0, in_epochs=True)
    config = Config.model_validate({"rollout": {"num_groups": 2, "group_size": 2}})

    def states(trajectories) -> list[int]:
        return [t.task.init_state for t in trajectories if t.task.member == 0]

    sampler = EpochSampler(config, spec)
    stream = Stream(num_envs=3, max_staleness=2, sampler=sampler)
    stream.pool.is_held = lambda task: key(task) == (1, 0, 1)
    with stream.open() as source:
        seen = states(source.get(1).kept)
        stream.update(source)
        rollout = source.get(2)
        seen += states(rollout.kept)
        saved = sampler.state()
    resumed = EpochSampler(config, spec)
    resumed.restore(saved)
    again = Stream(num_envs=3, max_staleness=2, iterations=4, state=rollout.open_episodes, sampler=resumed)
    again.engine.version = 2
    with again.open() as source:
        for iteration in range(3, 7):
            seen += states(source.get(iteration).kept)
            again.update(source)
    assert sorted(seen) == list(range(12)), "each one once, in whichever order they were trained on"
    assert resumed.consumed == 12


def test_groups_without_a_learning_signal_make_way_for_others_at_once():
    """Of the first batch nothing can be learned: an update needs more batches than the staleness alone would admit."""
    stream = Stream(num_envs=4, refill=True, max_refills=5)
    stream.pool.succeeds = lambda task: task.iteration > 2 and task.member == 0
    with stream.open() as source:
        rollout = source.get(1)
        assert groups_of(rollout.kept) == [(3, 0), (3, 1)]
        assert rollout.metrics["rollout/groups_dropped"] == 4
        assert {t.group for t in rollout.trajectories} >= {(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)}
        dropped = [t for t in rollout.trajectories if t.task.iteration < 3]
        assert all(t.transitions[0].inputs is None for t in dropped)


def test_too_few_groups_with_a_learning_signal_are_delivered_once_enough_were_tried():
    stream = Stream(num_envs=4, oversample=1.5)  # batches of three, without refills
    stream.pool.succeeds = lambda task: (task.iteration, task.group, task.member) == (1, 1, 0)
    with stream.open() as source:
        rollout = source.get(1)
        assert groups_of(rollout.kept) == [(1, 1)] and rollout.metrics["rollout/groups_dropped"] >= 2


def test_episodes_that_crash_are_left_out_and_none_that_runs_ends_the_run():
    stream = Stream(num_envs=4)
    stream.pool.crashes = lambda task: task.group == 0
    with stream.open() as source:
        rollout = source.get(1)
        assert {t.group for t in rollout.kept} <= {(1, 1), (2, 1)} and len(rollout.trajectories) == 4
        crashed = [t for t in rollout.trajectories if t.status == "crashed"]
        assert crashed and all(t.transitions == () or t.transitions[0].inputs is None for t in crashed)
    stream = Stream(num_envs=4)
    stream.pool.crashes = lambda task: True
    with stream.open() as source, pytest.raises(VlarlError, match=r"none of 4 episodes .* the simulator died"):
        source.get(1)


@pytest.mark.parametrize("where", ["environments", "reward", "tasks"])
def test_an_error_of_a_thread_arrives_after_what_was_complete_before_it(where):
    stream = Stream(refill=where == "tasks", max_refills=9)
    broken = BrokenError("it broke")

    def scoring(episodes, check):
        raise broken

    with stream.open() as source:
        assert becomes(lambda: len(stream.scored) == 8)
        if where == "environments":
            stream.pool.error = broken
        elif where == "reward":
            stream.scoring = scoring
        else:  # the reward thread replaces groups that are dropped
            stream.pool.succeeds = lambda task: task.iteration < 3
        for iteration in (1, 2):
            assert len(groups_of(source.get(iteration).kept)) == 2
            stream.update(source)
            if where == "tasks":
                stream.sampler.error = broken
                break
        with pytest.raises(BrokenError, match="it broke"):
            for iteration in (3, 4):
                source.get(iteration)
                stream.update(source)


def test_an_error_arrives_in_a_pause_as_well():
    stream = Stream()
    stream.pool.is_held = lambda task: True
    with stream.open() as source:
        assert becomes(lambda: len(stream.pool.running()) == 4)
        stream.pool.error = BrokenError("it broke")
        with pytest.raises(BrokenError), source.paused():
            raise AssertionError("an episode is under way")


def test_a_request_to_stop_ends_the_wait_and_comes_before_what_is_complete():
    stream = Stream()
    stream.pool.obeys = False
    stream.pool.is_held = lambda task: True
    with stream.open() as source:
        assert becomes(lambda: stream.pool.is_stuck), "the threads of the rollouts can't notice the request themselves"
        stream.guard.request()
        with pytest.raises(Interrupted):
            source.get(1)
        with pytest.raises(Interrupted), source.paused():
            raise AssertionError("episodes are under way")
        stream.pool.is_held = lambda task: False
    stream = Stream()
    with stream.open() as source:
        assert becomes(lambda: len(stream.scored) == 8)
        stream.guard.request()
        with pytest.raises(Interrupted):
            source.get(1)


class EndedThread(RolloutsAhead):
    """One of its threads dies without a word, as one that the interpreter gave up on."""

    def _roll_out(self) -> None:
        pass


def test_a_thread_that_has_ended_is_not_waited_for():
    found: list[str] = []

    def call() -> None:
        try:
            source.get(1)
        except RuntimeError as error:
            found.append(str(error))

    with Stream().open(EndedThread) as source:
        in_thread(call).join(LIMIT_S)
    assert found == ["a thread of the rollouts has ended without a rollout 1"]


@pytest.mark.parametrize("moment", ["idle", "running", "scoring"])
def test_leaving_ends_the_threads(moment):
    stream = Stream()
    if moment == "running":
        stream.pool.is_held = lambda task: True

    def scoring(episodes, check):
        while True:
            check()
            time.sleep(0.005)

    if moment == "scoring":
        stream.scoring = scoring
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError), stream.open():
        count = {"idle": lambda: len(stream.scored) == 8, "running": lambda: len(stream.pool.running()) == 4}
        assert becomes(count.get(moment, lambda: len(stream.pool.ended) == 8))
        raise ZeroDivisionError
    assert threads() == [] and time.monotonic() - started < LIMIT_S
    assert not stream.guard.requested, "the run was not asked to stop"


def test_a_slot_chooses_a_task_of_its_own_within_the_oldest_batch():
    def task(batch: int, task_id: int) -> Task:
        return Task("fake", task_id, 0, 0, iteration=batch)

    began: list[Task] = []
    supply = StreamedTasks(threading.Condition(), [("fake", 2), None], began.append)
    supply.add([task(1, 1), task(1, 2), task(2, 2), task(2, 3)])
    assert supply.take([0])[0].task == task(1, 2), "the task that the slot ran last"
    assert supply.take([0])[0].task == task(1, 1), "an older batch before the task that the slot ran last"
    supply.is_held = True
    assert not supply.wants(0) and supply.take([0, 1]) == {}
    supply.is_held = False
    assert {slot: each.task for slot, each in supply.take([1, 0]).items()} == {1: task(2, 2), 0: task(2, 3)}
    assert not supply.wants(0) and len(began) == 4
