"""Which episodes are run: groups, seeds, and disjoint initial states."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from vlarl.envs.base import SuiteSpec, TaskSpec
from vlarl.errors import UsageError
from vlarl.rollout.tasks import TaskSampler, derive_seed, evaluation_tasks
from vlarl.types import Task

SPEC = SuiteSpec(
    "suite",
    tuple(TaskSpec(i, f"do {i}", 10) for i in range(4)),
    train_states=(3, 4, 5, 6, 7),
    eval_states=(0, 1, 2),
    benchmark_states=(0, 1),
)


def grouped(tasks: list[Task]) -> list[list[Task]]:
    """Tasks by their group."""
    return [list(members) for _, members in itertools.groupby(tasks, key=lambda task: task.group)]


def sampler(configure, spec: SuiteSpec = SPEC, num_groups: int = 6, **env) -> TaskSampler:
    return TaskSampler(configure(rollout={"num_groups": num_groups, "group_size": 3}, env=env), spec)


def test_a_group_shares_task_and_state_and_nothing_random(configure):
    groups = grouped(sampler(configure).get_batch(1))
    assert len(groups) == 6
    for index, group in enumerate(groups):
        assert [task.member for task in group] == [0, 1, 2] and {task.group for task in group} == {index}
        assert len({(task.suite, task.task_id, task.init_state) for task in group}) == 1
        assert {(task.group_size, task.iteration) for task in group} == {(3, 1)}
    seeds = [task.seed for group in groups for task in group]
    assert len(set(seeds)) == 18
    assert len({task.episode_id for group in groups for task in group}) == 18


def test_seed_and_iteration_decide_everything(configure):
    one, same = sampler(configure), sampler(configure)
    assert one.get_batch(3) == same.get_batch(3)
    assert one.get_batch(3) == one.get_batch(3), "a call changes nothing"
    assert one.get_batch(3) != one.get_batch(4)
    other = TaskSampler(configure(run={"seed": 1}, rollout={"num_groups": 6, "group_size": 3}), SPEC)
    assert other.get_batch(3) != one.get_batch(3)
    seeds = {t.seed for n in range(5) for t in one.get_batch(n)}
    assert len(seeds) == 5 * 18


def test_seeds_are_those_that_the_documents_name(configure):
    """docs/data-flow.md: episodes of other versions can be run again only if these stay."""
    source = sampler(configure)
    for task in source.get_batch(3) + source.refill(3, 6, 2):
        assert task.seed == derive_seed(0, 0, 3, task.group, task.member)
    for task in evaluation_tasks(SPEC, None, 2, seed=5):
        assert task.seed == derive_seed(5, 1, task.task_id, task.init_state)
    assert derive_seed(5, 1, 2, 3) == 11870798798537686043


def test_tasks_are_sampled_evenly(configure):
    counts = Counter(group[0].task_id for group in grouped(sampler(configure, num_groups=10).get_batch(1)))
    assert sorted(counts.values()) == [2, 2, 3, 3]
    only = sampler(configure, task_ids=(1, 3), num_groups=4).get_batch(1)
    assert Counter(group[0].task_id for group in grouped(only)) == {1: 2, 3: 2}


def test_training_never_sees_the_states_of_the_evaluation(configure):
    seen = {t.init_state for n in range(30) for t in sampler(configure).get_batch(n)}
    evaluated = {t.init_state for t in evaluation_tasks(SPEC, None, 3, 0)}
    assert seen == {3, 4, 5, 6, 7} and evaluated == {0, 1, 2}
    mixed = sampler(configure, protocol="benchmark")
    assert {t.init_state for n in range(30) for t in mixed.get_batch(n)} == {0, 1}


def test_an_evaluation_is_always_the_same_and_its_seeds_are_its_own(configure):
    tasks = evaluation_tasks(SPEC, [2, 0], 2, seed=0)
    assert [(t.task_id, t.init_state) for t in tasks] == [(2, 0), (2, 1), (0, 0), (0, 1)]
    assert tasks == evaluation_tasks(SPEC, [2, 0], 2, seed=0)
    assert len({t.seed for t in tasks}) == 4
    training = {t.seed for n in range(50) for t in sampler(configure).get_batch(n)}
    assert training.isdisjoint(t.seed for t in evaluation_tasks(SPEC, None, 3, 0))


def test_a_protocol_has_states_of_its_own_and_a_state_keeps_its_seed():
    spec = replace(SPEC, benchmark_states=(5, 1))
    benchmark = evaluation_tasks(spec, [0], 2, 0, "benchmark")
    assert [t.init_state for t in benchmark] == [5, 1]
    assert benchmark[1] == evaluation_tasks(spec, [0], 2, 0, "disjoint")[1], "so that results can be paired"


def test_what_the_suite_does_not_have_is_refused(configure):
    with pytest.raises(UsageError, match=r"env.task_ids: suite has no task \[4, 9\]; its tasks are 0 to 3."):
        sampler(configure, task_ids=(9, 1, 4))
    with pytest.raises(UsageError, match=r"eval.states_per_task = 4: a task of suite has 3 initial states"):
        evaluation_tasks(SPEC, None, 4, 0)
    with pytest.raises(UsageError, match=r"eval.states_per_task = 3: a task of suite has 2 initial states"):
        evaluation_tasks(SPEC, None, 3, 0, "benchmark")


def test_seeds_depend_on_every_value():
    assert derive_seed(1, 2) == derive_seed(1, 2)
    assert len({derive_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)}) == 125
    assert all(0 <= derive_seed(n) < 2**64 for n in (0, 2**63, 2**64 - 1))
    assert derive_seed(2**64 - 1, 0) != derive_seed(2**64 - 1, 1)


def test_the_default_samples_what_it_has_always_sampled(configure):
    """Golden: task, state and the second member's seed, as the first release sampled them."""

    def sampled(seed: int, num_groups: int) -> list[tuple[int, int, int]]:
        config = configure(run={"seed": seed}, rollout={"num_groups": num_groups, "group_size": 2})
        return [
            (group[0].task_id, group[0].init_state, group[1].seed)
            for group in grouped(TaskSampler(config, SPEC).get_batch(3))
        ]

    assert sampled(0, 6) == [
        (2, 5, 2096468897581643214), (1, 3, 2825480883391543334), (3, 6, 17044252779539013498),
        (0, 4, 11083657113050338647), (1, 5, 14782478641267589045), (3, 7, 15270063205763651652),
    ]  # fmt: skip
    assert sampled(2**33 + 5, 3) == [
        (0, 3, 13714517334768292601), (1, 4, 17631528162444916121), (2, 5, 1462999514994656002)
    ]  # fmt: skip


def test_results_do_not_change_uniform_sampling(configure, episodes):
    source, informed = sampler(configure), sampler(configure)
    informed.report_results(episodes(0, [True] * 30) + episodes(1, [False] * 30))
    assert informed.get_batch(4) == source.get_batch(4)
    assert informed.refill(4, 6, 3) == source.refill(4, 6, 3)


def test_a_refill_continues_the_numbering_with_its_own_tasks_states_and_seeds(configure):
    source = sampler(configure, num_groups=4)
    first, second = source.refill(2, 4, 4), source.refill(2, 8, 4)
    assert [group[0].group for group in grouped(first + second)] == list(range(4, 12))
    assert {task.task_id for task in first} == {0, 1, 2, 3}, "assigned evenly, as in the first batch"
    batches = [
        [(g[0].task_id, g[0].init_state) for g in grouped(tasks)] for tasks in (source.get_batch(2), first, second)
    ]
    assert batches[0] != batches[1] != batches[2]
    seeds = {task.seed for task in source.get_batch(2) + first + second}
    assert len(seeds) == 12 * 3
    assert first == sampler(configure, num_groups=4).refill(2, 4, 4), "the same in a resumed run"
    assert source.refill(2, 4, 0) == []


def test_oversampling_samples_more_groups_rounded_up(configure):
    config = configure(rollout={"num_groups": 6, "group_size": 3, "oversample": 1.4})
    groups = grouped(TaskSampler(config, SPEC).get_batch(1))
    assert len(groups) == 9
    assert sorted(Counter(group[0].task_id for group in groups).values()) == [2, 2, 2, 3]


def test_single_episodes_come_in_shuffled_rounds_and_follow_from_their_index(configure):
    source = sampler(configure)
    tasks = source.get_episodes(range(40))
    rounds = [tuple(task.task_id for task in tasks[start : start + 4]) for start in range(0, 40, 4)]
    assert all(sorted(ids) == [0, 1, 2, 3] for ids in rounds) and len(set(rounds)) > 3
    assert {task.init_state for task in tasks} == set(SPEC.train_states)
    assert [task.group for task in tasks] == list(range(40)) and {task.group_size for task in tasks} == {1}
    assert len({task.seed for task in tasks}) == 40
    assert source.get_episodes([17, 3]) == [tasks[17], tasks[3]], "whoever is first"
    assert not {task.seed for task in tasks} & {task.seed for task in source.get_batch(0) + source.get_batch(1)}
    other = TaskSampler(configure(run={"seed": 1}), SPEC)
    assert not {task.seed for task in tasks} & {task.seed for task in other.get_episodes(range(40))}
    assert sampler(configure, task_ids=(2,)).get_episodes([0, 1])[1].task_id == 2


def test_single_episodes_follow_the_curriculum(configure, trajectory):
    """By weights, and with the results that were reported before."""
    config = configure(curriculum={"mode": "weighted", "weights": (0.0, 3.0, 0.0, 1.0)})
    counts = Counter(task.task_id for task in TaskSampler(config, SPEC).get_episodes(range(400)))
    assert set(counts) == {1, 3} and counts[1] == pytest.approx(300, abs=4 * (400 * 0.75 * 0.25) ** 0.5)
    source = TaskSampler(configure(curriculum={"mode": "adaptive", "tau": 0.05}), SPEC)
    before = source.get_episodes(range(400))
    solved = replace(trajectory([[1.0]]), success=True)
    source.report_results([replace(solved, task=replace(solved.task, task_id=i)) for i in (0, 1, 2)] * 50)
    after = Counter(task.task_id for task in source.get_episodes(range(400)))
    assert after[3] > 2 * Counter(task.task_id for task in before)[3]
