"""The tabletop pool: chunks, ends, rewards, videos, replays; and its Gymnasium environments."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from vlarl.envs.base import Record
from vlarl.envs.bench import bench_tabletop
from vlarl.envs.tabletop import ScriptedExpert, TabletopPool
from vlarl.envs.tabletop.env import GYM_IDS
from vlarl.envs.tabletop.pool import RewardMode
from vlarl.types import Task

SUITE = "tabletop_object"
MAX_STEPS = 32


def task(task_id: int = 7, init_state: int = 0, seed: int = 5) -> Task:
    return Task(SUITE, task_id, init_state, seed)


def expert_actions(reward: RewardMode = "sparse") -> tuple[np.ndarray, list[float], TabletopPool]:
    """The expert's actions [T, 7] and rewards of one episode, up to its success."""
    pool = TabletopPool(SUITE, 1, reward=reward)
    pool.reset([0], [task()])
    expert = ScriptedExpert(pool.world)
    expert.reset(0, 0)
    actions, rewards, outcome = [], [], None
    while outcome is None or not (outcome.terminated or outcome.truncated):
        assert len(actions) < 1000, "an episode has a limit"
        actions.append(expert.act(np.array([0])))
        outcome = pool.step_chunk([0], actions[-1][:, None])[0]
        rewards.append(float(outcome.rewards.sum()))
    assert outcome.success
    return np.concatenate(actions), rewards, pool


def idle(num_slots: int, num_actions: int) -> np.ndarray:
    actions = np.zeros((num_slots, num_actions, 7), dtype=np.float32)
    actions[..., 6] = -1
    return actions


def test_observations_follow_the_contract():
    pool = TabletopPool(SUITE, 2, image_size=56, cameras=("agent", "wrist"))
    observation = pool.reset([1], [task()])[0]
    assert observation.images.shape == (2, 56, 56, 3) and observation.images.dtype == np.uint8
    assert observation.proprio.dtype == np.float32
    np.testing.assert_allclose(observation.proprio, [0, 0, 0.2, 0, 0, 0, 0.04, -0.04], atol=1e-7)
    assert observation.instruction == "pick up the milk and place it in the basket"
    assert set(pool.spec.train_states).isdisjoint(pool.spec.eval_states)
    assert len(pool.spec.train_states) == 30 and len(pool.spec.eval_states) == 20


def test_success_terminates_is_rewarded_once_and_masks_the_rest_of_the_chunk():
    actions, rewards, _ = expert_actions()
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    pool = TabletopPool(SUITE, 1)
    pool.reset([0], [task()])
    chunk = np.concatenate([actions, idle(1, 5)[0]])[None]
    outcome = pool.step_chunk([0], chunk)[0]
    assert outcome.terminated and outcome.success and not outcome.truncated
    assert outcome.num_executed == len(actions)
    assert outcome.rewards[len(actions) - 1] == 1.0 and outcome.rewards.sum() == 1.0
    with pytest.raises(RuntimeError, match="reset"):
        pool.step_chunk([0], idle(1, 1))


def test_the_time_limit_truncates_and_does_not_terminate():
    pool = TabletopPool(SUITE, 2)
    pool.reset([0, 1], [task(), task(3)])
    for _ in range(MAX_STEPS // 8 - 1):
        assert all(not o.truncated and o.num_executed == 8 for o in pool.step_chunk([0, 1], idle(2, 8)))
    for outcome in pool.step_chunk([0, 1], idle(2, 10)):
        assert outcome.truncated and not outcome.terminated and not outcome.success
        assert outcome.num_executed == 8 and outcome.rewards.sum() == 0


def test_a_slot_that_was_never_reset_is_refused():
    pool = TabletopPool(SUITE, 2)
    pool.reset([0], [task()])
    with pytest.raises(RuntimeError, match=r"\[1\] run no episode"):
        pool.step_chunk([0, 1], idle(2, 1))
    with pytest.raises(ValueError, match="this pool runs"):
        pool.reset([0], [Task("tabletop_goal", 0, 0, 0)])


def test_equal_tasks_and_actions_replay_exactly_whatever_the_neighbours_do():
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 12, 7)).astype(np.float32)
    alone = TabletopPool(SUITE, 1)
    alone.reset([0], [task()])
    first = alone.step_chunk([0], actions)[0]
    crowd = TabletopPool(SUITE, 4)
    crowd.reset([2, 0, 3], [task(), task(1), task(2)])
    noise = np.random.default_rng(1).uniform(-1, 1, (2, 12, 7)).astype(np.float32)
    second = crowd.step_chunk([0, 2, 3], np.concatenate([noise[:1], actions, noise[1:]]))[1]
    np.testing.assert_array_equal(first.observation.images, second.observation.images)
    np.testing.assert_array_equal(first.observation.proprio, second.observation.proprio)


def test_one_chunk_of_four_equals_four_chunks_of_one():
    actions = np.random.default_rng(3).uniform(-1, 1, (2, 4, 7)).astype(np.float32)
    whole, single = TabletopPool(SUITE, 2), TabletopPool(SUITE, 2)
    for pool in (whole, single):
        pool.reset([0, 1], [task(0), task(1)])
    chunked = whole.step_chunk([0, 1], actions)
    for k in range(4):
        stepped = single.step_chunk([0, 1], actions[:, k : k + 1])
    for a, b in zip(chunked, stepped, strict=True):
        np.testing.assert_array_equal(a.observation.images, b.observation.images)


def test_dense_rewards_telescope_to_the_change_of_progress():
    _, rewards, pool = expert_actions("dense")
    fresh = TabletopPool(SUITE, 1)
    fresh.reset([0], [task()])
    start = float(fresh.world.progress(np.array([0]))[0])
    assert pool.world.progress(np.array([0]))[0] == 1.0
    assert sum(rewards) == pytest.approx(1.0 - start, abs=1e-5)
    assert 0 < start < 0.25


def test_recorded_slots_have_one_frame_a_step_and_others_none():
    actions, _, _ = expert_actions()
    pool = TabletopPool(SUITE, 2, video_size=128)
    pool.reset([0, 1], [task(), task(2)])
    chunk = np.repeat(np.concatenate([actions, idle(1, 2)[0]])[None], 2, axis=0)
    recorded, other = pool.step_chunk([0, 1], chunk, record=Record(frozenset({0})))
    assert len(recorded.frames) == recorded.num_executed == len(actions)
    assert other.frames == ()
    assert recorded.frames[0].shape == (128, 128, 3)
    np.testing.assert_array_equal(recorded.frames[-1], pool.frame(0))


@pytest.mark.parametrize("gym_id", GYM_IDS)
def test_gymnasium_accepts_the_single_environment(gym_id):
    env = gym.make(gym_id, render_mode="rgb_array")
    check_env(env.unwrapped, skip_render_check=False)


def test_the_vector_environment_restarts_at_the_step_after_an_end():
    actions, _, _ = expert_actions()
    envs = gym.make_vec("vlarl/TabletopObject-v0", num_envs=2)
    observation, _ = envs.reset(seed=1, options={"task_id": [7, 2], "init_state": 0})
    assert envs.observation_space.contains(observation)
    assert observation["instruction"][0] == "pick up the milk and place it in the basket"
    both = np.stack([actions, np.tile(idle(1, 1)[0], (len(actions), 1))], axis=1)
    for action in both:
        _, rewards, terminated, truncated, info = envs.step(action)
    assert rewards.tolist() == [1.0, 0.0] and terminated.tolist() == [True, False] and info["success"][0]
    observation, rewards, terminated, _, _ = envs.step(np.ones((2, 7), dtype=np.float32))
    assert not terminated.any() and rewards[0] == 0
    np.testing.assert_allclose(observation["proprio"][0, :3], [0, 0, 0.2], atol=1e-6)  # reset; the action was ignored
    assert not np.allclose(observation["proprio"][1, :3], [0, 0, 0.2])


def test_equal_seeds_sample_equal_episodes():
    def first_image(seed: int) -> np.ndarray:
        env = gym.make("vlarl/TabletopGoal-v0")
        return env.reset(seed=seed)[0]["image"]

    np.testing.assert_array_equal(first_image(3), first_image(3))
    assert (first_image(3) != first_image(4)).any()


def test_the_benchmark_counts_steps():
    result = bench_tabletop("tabletop_spatial", num_envs=8, image_size=32, steps=8)
    assert min(result.env_steps_per_s, result.unrendered_steps_per_s, result.chunked_steps_per_s) > 100
    assert result.unrendered_steps_per_s > result.env_steps_per_s
