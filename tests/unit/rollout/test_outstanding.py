"""The books of outstanding groups: the staleness bound, and that every group is trained on once or counted as dropped.

A simulated run with slow and fast episodes notes itself which weights decided in which episode: the bound is checked
against these notes, not against the books.
"""

import json
import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from fakes.streaming import CountingSampler, groups_of, returns_differ
from hypothesis import given, settings
from hypothesis import strategies as st

from vlarl.config.schema import RolloutConfig
from vlarl.rollout.outstanding import Group, OutstandingGroups, read_outstanding
from vlarl.rollout.selection import GroupRule
from vlarl.types import Earlier, Observation, Task, Trajectory

FAST, SLOW = 2, 25  # ticks of an episode


NOTHING = Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(8, np.float32), "")
BLANK = Trajectory(
    Task("fake", 0, 0, 0), (), NOTHING, terminated=True, truncated=False, success=False, policy_version=0
)
"""An episode without decisions, which the simulation notes elsewhere."""


@dataclass
class Simulated:
    """A run in ticks: slots with episodes of unequal length, scoring that takes a while, updates that take a while."""

    config: RolloutConfig
    max_staleness: int
    num_slots: int
    iterations: int
    seed: int
    crash_rate: float = 0.0
    slow_rate: float = 0.25
    state: dict[str, Any] | None = None
    done: int = 0  # iterations before this session
    version: int = 0
    trained: list[tuple[int, int]] = field(default_factory=list)  # groups, in order
    dropped: list[tuple[int, int]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)  # of the oldest decision of each group that was trained on
    sizes: list[int] = field(default_factory=list)  # groups of each update
    most: int = 0  # outstanding at a time
    states: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        left = self.iterations - self.done
        rule = GroupRule(self.config, returns_differ)
        self.groups = OutstandingGroups(self.config, rule, self.max_staleness, left, self.done + 1)
        self.waiting: deque[Task] = deque(self.groups.restore(self.state or {}))
        self.sampler = CountingSampler(
            int(-(-self.config.num_groups * self.config.oversample // 1)), self.config.group_size
        )
        self.running: list[tuple[Task, int]] = []
        self.decided: dict[Task, list[int]] = {}  # versions of the decisions of each episode
        self.scoring: list[tuple[Group, int]] = []
        self.admit()

    def admit(self) -> None:
        while self.groups.wants_batch:
            tasks = self.sampler.get_batch(self.groups.next_batch)
            self.groups.admit(tasks)
            self.waiting += tasks
        self.most = max(self.most, self.groups.num_outstanding)

    def episode(self, task: Task) -> Trajectory:
        status = "crashed" if self.rng.random() < self.crash_rate else "ok"
        won = self.rng.random() < 0.5
        earlier = Earlier(reward=float(won))
        return replace(BLANK, task=task, status=status, success=won, earlier=earlier)

    def tick(self) -> None:
        """Every episode makes a decision; those that end leave their slots to others."""
        while self.waiting and len(self.running) < self.num_slots:
            task = self.waiting.popleft()
            self.groups.begin(task, self.version)
            self.running.append((task, SLOW if self.rng.random() < self.slow_rate else FAST))
        for task, _ in self.running:
            self.decided.setdefault(task, []).append(self.version)
        over = [task for task, left in self.running if left == 1]
        self.running = [(task, left - 1) for task, left in self.running if left > 1]
        for task in over:
            if (group := self.groups.end(self.episode(task))) is not None:
                assert all(member in self.decided for member in group.tasks)
                assert not {task for task, _ in self.running} & set(group.tasks), "a member still runs"
                self.scoring.append((group, self.rng.randint(1, 3)))
        for group, left in self.scoring:
            if left == 1:
                self.groups.conclude(group, group.ended)
        self.scoring = [(group, left - 1) for group, left in self.scoring if left > 1]
        self.admit()

    def iterate(self) -> None:
        """Wait for enough groups, then train on them for a while."""
        for _ in range(20_000):
            if self.groups.has_enough and not self.groups.has_stragglers(self.version):
                break
            self.tick()
        else:
            raise AssertionError("no update becomes due")
        delivery = self.groups.deliver(self.version)
        reported, kept = groups_of(delivery.trajectories), groups_of(delivery.kept)
        all_crashed = {
            group for group in reported if all(t.status == "crashed" for t in delivery.trajectories if t.group == group)
        }
        is_active = self.config.refill or self.config.oversample > 1
        trained = [group for group in reported if group in kept or (not is_active and group in all_crashed)]
        self.trained += trained
        self.dropped += [group for group in reported if group not in trained]
        self.sizes.append(len(trained))
        for group in trained:
            versions = [v for task, made in self.decided.items() if (task.iteration, task.group) == group for v in made]
            self.ages.append(self.version - min(versions))
        self.states.append(json.loads(json.dumps(delivery.outstanding)))
        for _ in range(self.rng.randint(0, 12)):
            self.tick()
        self.version += 1
        self.groups.trained()
        self.admit()
        self.done += 1

    def left(self) -> list[tuple[int, int]]:
        """Groups that were outstanding after the last delivery."""
        return [(row["batch"], row["group"]) for row in self.states[-1]["groups"]]

    def run(self, until: int | None = None) -> "Simulated":
        while self.done < (until or self.iterations):
            self.iterate()
        return self


runs = st.fixed_dictionaries(
    {
        "max_staleness": st.integers(1, 3),
        "num_slots": st.integers(1, 9),
        "seed": st.integers(0, 10**6),
        "crash_rate": st.sampled_from([0.0, 0.2]),
    }
)
shapes = st.fixed_dictionaries({"num_groups": st.integers(1, 4), "group_size": st.integers(2, 3)})
dynamic = st.sampled_from([{"refill": True}, {"oversample": 1.5}, {"refill": True, "oversample": 1.5}])


@settings(max_examples=60)
@given(run=runs, shape=shapes)
def test_no_decision_is_older_than_the_bound_and_every_group_is_trained_on_once(run, shape):
    simulated = Simulated(RolloutConfig(**shape), iterations=6, **run).run()
    assert max(simulated.ages) <= run["max_staleness"]
    num = shape["num_groups"]
    assert all(size >= num for size in simulated.sizes) and simulated.dropped == []
    left = simulated.left()
    assert len(left) < num, "a batch is not admitted unless some group of it is needed"
    assert sorted(simulated.trained + left) == [(b, g) for b in simulated.sampler.batches for g in range(num)]
    assert simulated.most <= (run["max_staleness"] + 1) * num


def test_without_stragglers_every_update_has_its_groups_and_nothing_is_left_over():
    config = RolloutConfig(num_groups=3, group_size=2)
    simulated = Simulated(config, 2, num_slots=6, iterations=6, seed=0, slow_rate=0.0).run()
    assert simulated.sizes == [3] * 6 and simulated.left() == [] and simulated.sampler.batches == [1, 2, 3, 4, 5, 6]


@settings(max_examples=60)
@given(run=runs, shape=shapes, options=dynamic)
def test_with_dynamic_sampling_every_group_is_trained_on_dropped_or_still_outstanding(run, shape, options):
    config = RolloutConfig(**shape, **options)
    simulated = Simulated(config, iterations=6, **run).run()
    assert max(simulated.ages, default=0) <= run["max_staleness"]
    left = simulated.left()
    num_batch = simulated.sampler.num_groups
    assert simulated.most <= run["max_staleness"] * shape["num_groups"] + num_batch
    seen = simulated.trained + simulated.dropped
    assert len(set(seen)) == len(seen)
    admitted = {(batch, group) for batch in simulated.sampler.batches for group in range(num_batch)}
    assert set(seen) <= admitted and not set(left) & set(seen)
    unknown = admitted - set(seen) - set(left)
    assert all(batch >= simulated.states[-1]["next_batch"] for batch, _ in unknown), "or was admitted since then"
    if not options.get("refill"):
        return
    assert sum(simulated.sizes) >= 0.5 * shape["num_groups"] * 6, "dropped groups are replaced"


@settings(max_examples=40)
@given(run=runs, shape=shapes, until=st.integers(1, 5))
def test_a_resumed_run_trains_on_the_groups_that_were_outstanding(run, shape, until):
    """The first session ends after some update, with groups that run and groups that wait; none of them is lost."""
    config = RolloutConfig(**shape)
    first = Simulated(config, iterations=6, **run).run(until)
    resumed = Simulated(config, iterations=6, **run, done=until, version=first.version, state=first.states[-1]).run()
    batches = range(1, resumed.groups.next_batch)
    expected = [(batch, group) for batch in batches for group in range(shape["num_groups"])]
    assert sorted(first.trained + resumed.trained + resumed.left()) == expected and len(resumed.left()) < len(expected)
    assert max(first.ages + resumed.ages) <= run["max_staleness"]


@pytest.fixture
def one_by_one():
    """Two groups of two make an update, with a staleness of 1; all four groups that are allowed have begun."""
    config = RolloutConfig(num_groups=2, group_size=2)
    groups = OutstandingGroups(config, GroupRule(config, returns_differ), 1)
    sampler = CountingSampler(2, 2)
    tasks = [task for batch in (1, 2) for task in sampler.get_batch(batch)]
    for batch in (1, 2):
        assert groups.wants_batch
        groups.admit(sampler.get_batch(batch))
    assert not groups.wants_batch

    def conclude(batch: int, group: int) -> None:
        ends = [task for task in tasks if (task.iteration, task.group) == (batch, group)]
        found = [groups.end(replace(BLANK, task=task)) for task in reversed(ends)]
        assert found[0] is None and found[1] is not None, "complete with its last member, not before"
        groups.conclude(found[1], found[1].ended)

    return groups, tasks, conclude


def test_the_oldest_by_their_beginning_are_delivered_and_what_is_left_is_counted(one_by_one):
    groups, tasks, conclude = one_by_one
    for task in (tasks[6], tasks[0], tasks[2], tasks[4]):  # the first member of 2/1, 1/0, 1/1, 2/0
        groups.begin(task, version=0)
    for batch, group in ((1, 1), (1, 0), (2, 1)):
        assert not groups.has_enough or (batch, group) == (2, 1)
        conclude(batch, group)
    assert groups.has_enough and not groups.has_stragglers(0) and groups.has_stragglers(1)
    delivery = groups.deliver(0)
    assert groups_of(delivery.kept) == [(2, 1), (1, 0)]
    assert [t.task.member for t in delivery.kept] == [0, 1, 0, 1], "members in their order"
    assert delivery.metrics == {"rollout/groups_unfinished": 1.0, "rollout/groups_waiting": 1.0}
    saved = [(row["batch"], row["group"]) for row in delivery.outstanding["groups"]]
    assert saved == [(1, 1), (2, 0)] and delivery.outstanding["next_batch"] == 3
    assert groups.num_outstanding == 4 and not groups.wants_batch, "the update is not done yet"
    groups.trained()
    assert groups.num_outstanding == 2 and groups.wants_batch


def test_groups_that_would_become_too_old_are_delivered_beyond_the_count(one_by_one):
    """Two are left at version 0 and one began at version 1: at version 1, all of version 0 have their last chance."""
    groups, tasks, conclude = one_by_one
    groups.num_groups = 1  # as if an update took one of them
    for task in tasks[::2]:
        groups.begin(task, version=0 if task is not tasks[6] else 1)
    for batch, group in ((1, 0), (1, 1), (2, 0), (2, 1)):
        conclude(batch, group)
    assert groups_of(groups.deliver(1).kept) == [(1, 0), (1, 1), (2, 0)]
    assert groups_of(groups.deliver(2).kept) == [(2, 1)]


def test_what_is_saved_comes_back_as_the_same_tasks(one_by_one):
    groups, tasks, conclude = one_by_one
    for task in tasks[::2]:
        groups.begin(task, version=0)
    conclude(1, 0), conclude(1, 1)
    saved = json.loads(json.dumps(groups.deliver(0).outstanding))
    assert read_outstanding(saved) == (3, tasks[4:])
    assert read_outstanding({}) == (None, [])
    assert read_outstanding({"num_begun": [1], "episodes": []}) == (None, []), "of a run with rollout.num_steps"
    with pytest.raises(ValueError, match="outstanding already"):
        groups.restore({"next_batch": 3, "groups": saved["groups"] * 2})


def test_what_is_not_trained_on_lets_its_inputs_go(trajectory):
    config = RolloutConfig(num_groups=1, group_size=2, refill=True)
    groups = OutstandingGroups(config, GroupRule(config, returns_differ), 1)
    tasks = CountingSampler(2, 2).get_batch(1)
    groups.admit(tasks)
    lost, won = trajectory([[0.0]]), trajectory([[1.0]], success=True, terminated=True)
    ends = [lost, won, won, won]  # the second group has nothing to learn from
    for task, end in zip(tasks, ends, strict=True):
        groups.begin(task, 0)
        if (group := groups.end(replace(end, task=task))) is not None:
            groups.conclude(group, group.ended)
    assert groups.num_outstanding == 1 and groups.num_unreported == 2, "what is dropped makes way at once"
    delivery = groups.deliver(0)
    by_group = {t.task.group: t.transitions[0].inputs is None for t in delivery.trajectories}
    assert by_group == {0: False, 1: True} and delivery.metrics["rollout/groups_dropped"] == 1
    assert groups_of(delivery.kept) == [(1, 0)]
