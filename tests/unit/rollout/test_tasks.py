"""Which episodes are run: groups, seeds, and initial states kept apart."""

from collections import Counter

import pytest

from vlarl.envs.base import SuiteSpec, TaskSpec
from vlarl.errors import UsageError
from vlarl.rollout.tasks import TaskSampler, derive_seed, evaluation_tasks

SPEC = SuiteSpec(
    "suite", tuple(TaskSpec(i, f"do {i}", 10) for i in range(4)), train_states=(3, 4, 5, 6, 7), eval_states=(0, 1, 2)
)


def sampler(configure, spec: SuiteSpec = SPEC, num_groups: int = 6, **env) -> TaskSampler:
    return TaskSampler(configure(rollout={"num_groups": num_groups, "group_size": 3}, env=env), spec)


def test_a_group_shares_task_and_state_and_nothing_random(configure):
    groups = sampler(configure).groups(1)
    assert len(groups) == 6
    for number, group in enumerate(groups):
        assert [task.member for task in group] == [0, 1, 2] and {task.group for task in group} == {number}
        assert len({(task.suite, task.task_id, task.init_state) for task in group}) == 1
    seeds = [task.seed for group in groups for task in group]
    assert len(set(seeds)) == 18
    assert len({task.episode_id for group in groups for task in group}) == 18


def test_seed_and_iteration_decide_everything(configure):
    one, same = sampler(configure), sampler(configure)
    assert one.groups(3) == same.groups(3)
    assert one.groups(3) == one.groups(3), "it keeps no state"
    assert one.groups(3) != one.groups(4)
    other = TaskSampler(configure(run={"seed": 1}, rollout={"num_groups": 6, "group_size": 3}), SPEC)
    assert other.groups(3) != one.groups(3)
    seeds = {t.seed for n in range(5) for g in one.groups(n) for t in g}
    assert len(seeds) == 5 * 18


def test_tasks_are_dealt_out_evenly(configure):
    counts = Counter(group[0].task_id for group in sampler(configure, num_groups=10).groups(1))
    assert sorted(counts.values()) == [2, 2, 3, 3]
    only = sampler(configure, task_ids=(1, 3), num_groups=4).groups(1)
    assert Counter(group[0].task_id for group in only) == {1: 2, 3: 2}


def test_training_never_sees_the_states_of_the_evaluation(configure):
    seen = {t.init_state for n in range(30) for g in sampler(configure).groups(n) for t in g}
    evaluated = {t.init_state for t in evaluation_tasks(SPEC, None, 3, 0)}
    assert seen == {3, 4, 5, 6, 7} and evaluated == {0, 1, 2}
    mixed = sampler(configure, train_on_eval_states=True)
    assert {t.init_state for n in range(30) for g in mixed.groups(n) for t in g} == {0, 1, 2}


def test_an_evaluation_is_always_the_same_and_its_seeds_are_its_own(configure):
    tasks = evaluation_tasks(SPEC, [2, 0], 2, seed=0)
    assert [(t.task_id, t.init_state) for t in tasks] == [(2, 0), (2, 1), (0, 0), (0, 1)]
    assert tasks == evaluation_tasks(SPEC, [2, 0], 2, seed=0)
    assert len({t.seed for t in tasks}) == 4
    training = {t.seed for n in range(50) for g in sampler(configure).groups(n) for t in g}
    assert training.isdisjoint(t.seed for t in evaluation_tasks(SPEC, None, 3, 0))


def test_what_the_suite_does_not_have_is_refused(configure):
    with pytest.raises(UsageError, match=r"env.task_ids: suite has no task \[4, 9\]; its tasks are 0 to 3."):
        sampler(configure, task_ids=(9, 1, 4))
    with pytest.raises(UsageError, match=r"eval.states_per_task: 4 is more than the 3 evaluation states"):
        evaluation_tasks(SPEC, None, 4, 0)


def test_seeds_depend_on_every_number():
    assert derive_seed(1, 2) == derive_seed(1, 2)
    assert len({derive_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)}) == 125
    assert all(0 <= derive_seed(n) < 2**64 for n in (0, 2**63, 2**64 - 1))
    assert derive_seed(2**64 - 1, 0) != derive_seed(2**64 - 1, 1)
