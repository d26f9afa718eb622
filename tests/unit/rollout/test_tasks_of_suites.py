"""Tasks of several suites: how they are sampled, named and evaluated."""

import pytest

from vlarl.envs.base import SuiteSpec, TaskSpec, united
from vlarl.errors import UsageError
from vlarl.rollout.curriculum import read_curriculum
from vlarl.rollout.tasks import TaskSampler, evaluation_tasks, evaluations_of

BOTH = {"suites": ("tabletop_spatial", "tabletop_object")}
TASKS = tuple(TaskSpec(i, f"do {i}", 10) for i in range(4))
SPECS = [
    SuiteSpec(name, TASKS, train_states=(3, 4, 5, 6, 7), eval_states=(0, 1, 2), benchmark_states=(0, 1))
    for name in BOTH["suites"]
]


def sampler(configure, **env) -> TaskSampler:
    return TaskSampler(configure(rollout={"num_groups": 8, "group_size": 2}, env=BOTH | env), united(SPECS))


def test_a_round_has_every_task_of_every_suite_once(configure):
    tasks = sampler(configure).get_batch(1)
    assert sorted({task.key for task in tasks}) == sorted((s, i) for s in BOTH["suites"] for i in range(4))
    assert len({(task.key, task.group) for task in tasks}) == 8, "one group of each"


def test_tasks_are_configured_for_all_suites_and_for_one(configure):
    some = sampler(configure, task_ids=(0, 3), suite_tasks={"tabletop_object": (1,)})
    assert some.tasks == [("tabletop_spatial", 0), ("tabletop_spatial", 3), ("tabletop_object", 1)]


def test_one_suite_named_as_several_is_as_before(configure):
    alone = TaskSampler(configure(env={"suite": "tabletop_spatial"}), SPECS[0])
    named = TaskSampler(configure(env={"suites": ("tabletop_spatial",)}), united(SPECS[:1]))
    assert named.get_batch(3) == alone.get_batch(3) and named.describe() == alone.describe()


def test_evaluations_are_those_of_each_suite(configure):
    config = configure(env=BOTH, eval={"states_per_task": 2}, run={"seed": 4})
    found = evaluations_of(config, united(SPECS))
    assert found == [task for spec in SPECS for task in evaluation_tasks(spec, None, 2, 4)]


def test_a_curriculum_serves_runs_with_some_of_its_suites(configure, tmp_path):
    path = tmp_path / "curriculum.json"
    record = '{"success": 0.5, "weight": 2.0, "episodes": 2}'
    path.write_text(f'{{"suite": "a+b", "tasks": {{"a/3": {record}, "b/3": {record}}}}}')
    assert list(read_curriculum(path, ["b"])["tasks"]) == ["3"]
    assert list(read_curriculum(path, ["b", "c"])["tasks"]) == ["a/3", "b/3"]
    path.write_text(f'{{"suite": "a", "tasks": {{"3": {record}}}}}')
    assert list(read_curriculum(path, ["a", "c"])["tasks"]) == ["a/3"]
    with pytest.raises(UsageError, match="is for a, and env.suites are c, d: these suites have different tasks"):
        read_curriculum(path, ["c", "d"])
