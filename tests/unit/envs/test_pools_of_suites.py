"""One pool, several suites: any slot runs any task, with the instruction and the time limit of its suite."""

import numpy as np
import pytest

from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.envs.base import fitting
from vlarl.envs.build import build_pool
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.types import Task

LONG, SHORT = Task("tabletop_long", 2, 0, 1), Task("tabletop_object", 2, 0, 1)


def lengths(pool, tasks: list[Task]) -> list[int]:
    """Steps until each episode of a robot that stands still ends."""
    pool.reset([0, 1], tasks)
    still = np.zeros((2, 100, 7), np.float32)
    return [outcome.num_executed for outcome in pool.step_chunk([0, 1], still)]


def test_episodes_are_those_of_a_pool_of_their_suite():
    pool = build_pool(EnvConfig(suites=("tabletop_long", "tabletop_object")), GymConfig(), 2, 24, "sparse")
    together = pool.reset([0, 1], [LONG, SHORT])
    for task, seen in zip((LONG, SHORT), together, strict=True):
        (alone,) = TabletopPool(task.suite, 1, 24).reset([0], [task])
        assert seen.instruction == alone.instruction
        np.testing.assert_array_equal(seen.images, alone.images)
    assert lengths(pool, [LONG, SHORT]) == [64, 32] and lengths(pool, [SHORT, LONG]) == [32, 64]
    with pytest.raises(ValueError, match="runs tabletop_long, tabletop_object, but the task is of tabletop_goal"):
        pool.reset([0], [Task("tabletop_goal", 0, 0, 0)])


def test_a_configured_limit_is_that_of_all_suites():
    env = EnvConfig(suites=("tabletop_long", "tabletop_object"), max_steps=5)
    assert lengths(build_pool(env, GymConfig(), 2, 24, "sparse"), [LONG, SHORT]) == [5, 5]


def test_a_slot_keeps_its_task_and_not_one_of_the_same_index_in_another_suite():
    waiting = [SHORT, LONG]
    assert fitting(waiting, ("tabletop_long", 2), {("tabletop_long", 2)}) == 1
    assert fitting(waiting, None, {("tabletop_object", 2)}) == 1
