"""The contract of every EnvPool with the collector, tested on all suites of the built-in one."""

import numpy as np
import pytest

from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.envs.base import EnvPool, Record
from vlarl.envs.build import build_pool
from vlarl.envs.tabletop.tasks import SUITES
from vlarl.errors import UsageError
from vlarl.types import Task

SIZE = 24


@pytest.fixture(params=list(SUITES))
def pool(request) -> EnvPool:
    return build_pool(EnvConfig(suite=request.param), GymConfig(), 3, SIZE, "dense")


def task(pool: EnvPool, task_id: int = 0, state: int = 0, seed: int = 1) -> Task:
    return Task(pool.spec.name, task_id, state, seed)


def noise(rows: int, steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, steps, 7)).astype(np.float32)


def test_the_suite_describes_itself(pool):
    spec = pool.spec
    assert [t.task_id for t in spec.tasks] == list(range(10)) and pool.num_envs == 3
    assert len({t.instruction for t in spec.tasks}) == 10 and all(t.max_steps > 0 for t in spec.tasks)
    assert set(spec.train_states).isdisjoint(spec.eval_states)
    assert len(set(spec.train_states) | set(spec.eval_states)) == 50
    assert (spec.action_dim, spec.proprio_dim) == (7, 8)


def test_observations_are_upright_rgb_state_and_the_tasks_instruction(pool):
    for slot, observation in enumerate(pool.reset([2, 0], [task(pool, 4), task(pool, 9)])):
        assert observation.images.shape == (1, SIZE, SIZE, 3) and observation.images.dtype == np.uint8
        assert observation.images.std() > 5, "an image, not one colour"
        assert observation.proprio.shape == (8,) and observation.proprio.dtype == np.float32
        assert observation.instruction == pool.spec.tasks[(4, 9)[slot]].instruction
    frame = pool.frame(2)
    assert frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3 and frame.shape[0] >= SIZE


def test_states_and_tasks_differ_and_the_same_ones_are_the_same(pool):
    a, b, c = pool.reset([0, 1, 2], [task(pool, 0, 0), task(pool, 0, 1), task(pool, 0, 0, seed=9)])
    assert not np.array_equal(a.images, b.images)
    np.testing.assert_array_equal(a.images, c.images)


def test_an_episode_replays_to_the_bit_in_any_slot(pool):
    def play(slot: int, others: list[int]) -> list[np.ndarray]:
        slots = [slot, *others]
        pool.reset(slots, [task(pool, 3, 7), *(task(pool, 1, 2) for _ in others)])
        seen = []
        for chunk in range(3):
            actions = np.concatenate([noise(1, 4, chunk), noise(len(others), 4, 50 + slot)])
            outcome = pool.step_chunk(slots, actions)[0]
            seen += [outcome.observation.images, outcome.observation.proprio, outcome.rewards]
        return seen

    for ours, theirs in zip(play(0, []), play(2, [0, 1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_observations_are_not_overwritten_by_later_steps(pool):
    first = pool.reset([0], [task(pool)])[0]
    kept = first.images.copy(), first.proprio.copy()
    pool.step_chunk([0], noise(1, 6))
    np.testing.assert_array_equal(first.images, kept[0])
    np.testing.assert_array_equal(first.proprio, kept[1])


def test_the_chunk_stops_at_the_time_limit_and_the_rest_is_not_executed(pool):
    limit = pool.spec.tasks[0].max_steps
    pool.reset([1], [task(pool)])
    idle = np.zeros((1, limit + 5, 7), np.float32)
    outcome = pool.step_chunk([1], idle)[0]
    assert outcome.num_executed == limit and outcome.rewards.shape == (limit + 5,)
    assert outcome.truncated and not outcome.terminated and not outcome.success and outcome.error is None
    assert (outcome.rewards[limit:] == 0).all()
    with pytest.raises(RuntimeError):
        pool.step_chunk([1], idle)
    pool.reset([1], [task(pool)])
    assert pool.step_chunk([1], idle[:, :1])[0].num_executed == 1


def test_only_recorded_slots_have_frames_one_a_step(pool):
    pool.reset([0, 1], [task(pool), task(pool, 1)])
    recorded, plain = pool.step_chunk([0, 1], noise(2, 3), Record(frozenset({0})))
    assert len(recorded.frames) == 3 and plain.frames == ()
    pool.close()


def test_recorded_steps_are_what_is_seen_step_by_step_and_change_nothing(pool):
    limit = pool.spec.tasks[0].max_steps
    slots, tasks, actions = [0, 1, 2], [task(pool, i) for i in range(3)], noise(3, limit + 3)
    pool.reset(slots, tasks)
    recorded, plain, _ = pool.step_chunk(slots, actions, Record(steps=frozenset({0, 2})))
    assert plain.passed == () and recorded.frames == () and len(recorded.passed) == recorded.num_executed - 1 > 3
    pool.reset(slots, tasks)
    for unrecorded, other in zip(pool.step_chunk(slots, actions), (recorded, plain), strict=False):
        np.testing.assert_array_equal(unrecorded.observation.images, other.observation.images)
        np.testing.assert_array_equal(unrecorded.rewards, other.rewards)
    pool.reset([1], [tasks[0]])
    for k, passed in enumerate([*recorded.passed, recorded.observation]):
        single = pool.step_chunk([1], actions[:1, k : k + 1])[0]
        np.testing.assert_array_equal(passed.images, single.observation.images)
        np.testing.assert_array_equal(passed.proprio, single.observation.proprio)
        assert passed.instruction == single.observation.instruction and recorded.rewards[k] == single.rewards[0]


def test_an_unknown_suite_is_refused_with_the_known_ones():
    with pytest.raises(
        UsageError, match=r"env.suite: 'tabletop' does not run in processes; those that do: libero_spat"
    ):
        build_pool(EnvConfig(suite="tabletop"), GymConfig(), 1, SIZE, "sparse")
