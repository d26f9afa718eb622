"""Meta-World as a SingleEnv: observations, actions, and episodes that repeat to the bit."""

import hashlib
import os

import numpy as np
import pytest

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
os.environ.setdefault("LP_NUM_THREADS", "1")

from vlarl.config.metaworld_tasks import METAWORLD_TASKS
from vlarl.config.schema import EnvConfig
from vlarl.envs.metaworld import env as module
from vlarl.envs.metaworld import metaworld_factory
from vlarl.envs.metaworld.env import MetaWorldEnv, from_metaworld, to_metaworld
from vlarl.envs.metaworld.render import ModelRenderer
from vlarl.envs.metaworld.simulator import Simulator
from vlarl.types import Task

REACH, PUSH, PICK_PLACE, DRAWER_OPEN, WINDOW_CLOSE = 0, 1, 2, 4, 9
HOLD_OPEN = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
HOLD_CLOSED = np.array([0, 0, 0, 0, 0, 0, 0], np.float32)


def task(task_id: int, state: int = 0, seed: int = 0) -> Task:
    return Task("metaworld_mt10", task_id, state, seed)


def build(reward: str = "sparse", **config) -> MetaWorldEnv:
    return metaworld_factory(EnvConfig(suite="metaworld_mt10", **config), 64, reward).build()


@pytest.fixture(scope="module")
def env():
    env = build(cameras=("agent", "wrist"))
    yield env
    env.close()


@pytest.fixture(scope="module")
def reach():
    return Simulator("reach-v3")


def fingerprint(env: MetaWorldEnv, chosen: Task, num_steps: int = 24) -> str:
    """A digest of everything that an episode with fixed random actions shows."""
    rng = np.random.default_rng(7)
    digest = hashlib.sha256()
    env.reset(chosen)
    for step in range(num_steps):
        if step % 8 == 0:
            seen = env.observe()
            digest.update(seen.images.tobytes() + seen.proprio.tobytes())
        outcome = env.step(np.append(rng.uniform(-1, 1, 6), rng.integers(2)).astype(np.float32))
        digest.update(repr(outcome).encode() + env.state.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("task_id", range(10))
def test_every_task_of_mt10_starts_steps_and_is_seen(env, task_id):
    env.reset(task(task_id))
    first = env.observe()
    assert env.env_name == METAWORLD_TASKS["metaworld_mt10"][task_id]
    assert first.images.shape == (2, 64, 64, 3)
    assert first.images.dtype == np.uint8
    assert min(image.std() for image in first.images) > 10
    assert first.proprio.shape == (8,)
    assert first.proprio.dtype == np.float32
    outcome = env.step(HOLD_OPEN)
    assert (outcome.reward, outcome.terminated, outcome.truncated, outcome.success) == (0.0, False, False, False)
    assert env.frame().shape == (256, 256, 3)


def test_an_action_of_one_moves_the_hand_a_centimetre_along_each_axis(env):
    for axis in range(3):
        env.reset(task(REACH))
        for _ in range(20):
            env.step(HOLD_OPEN)  # the hand sags a little at first
        before = env.observe().proprio
        action = HOLD_OPEN.copy()
        action[axis] = 1.0
        for _ in range(5):
            env.step(action)
        for _ in range(20):
            env.step(HOLD_OPEN)
        moved = env.observe().proprio[:3] - before[:3]
        assert moved[axis] == pytest.approx(0.05, abs=0.005)
        assert np.abs(np.delete(moved, axis)).max() < 0.005


def test_rotation_is_ignored_and_actions_are_bounded():
    action = np.array([0.5, -3.0, 0.25, 0.9, -0.9, 0.3, 1.0], np.float32)
    assert to_metaworld(action).tolist() == [0.5, -1.0, 0.25, -1.0]


@pytest.mark.parametrize(("gripper", "effort"), [(1.0, -1.0), (0.0, 1.0), (0.5, 0.0), (0.25, 0.5), (-4.0, 1.0)])
def test_one_opens_and_zero_closes(gripper, effort):
    action = np.array([0, 0, 0, 0, 0, 0, gripper], np.float32)
    assert to_metaworld(action)[3] == effort


def test_an_experts_action_comes_back_unchanged():
    actions = np.random.default_rng(0).uniform(-1, 1, (50, 4))
    for action in actions:
        np.testing.assert_allclose(to_metaworld(from_metaworld(action)), action, atol=1e-6)
    assert from_metaworld(np.array([2.0, 0, 0, 0.0])).tolist() == [1, 0, 0, 0, 0, 0, 0.5]


def test_fingers_close_at_zero_and_open_at_one(env):
    env.reset(task(REACH))
    np.testing.assert_allclose(env.observe().proprio[6:], [0.04, -0.03], atol=1e-3)
    for _ in range(40):
        env.step(HOLD_CLOSED)
    np.testing.assert_allclose(env.observe().proprio[6:], [0, 0], atol=1e-3)
    for _ in range(40):
        env.step(HOLD_OPEN)
    np.testing.assert_allclose(env.observe().proprio[6:], [0.04, -0.03], atol=2e-3)


def test_proprio_is_hand_no_rotation_fingers(env, reach):
    env.reset(task(REACH, 3))
    state = reach.start(3)
    proprio = env.observe().proprio
    np.testing.assert_allclose(proprio[:3], state[:3], atol=1e-6)
    assert proprio[3:6].tolist() == [0, 0, 0]


def test_the_sparse_reward_is_one_at_success_and_the_dense_one_a_tenth_of_meta_worlds(reach):
    sparse, dense = build("sparse"), build("dense")
    for env in (sparse, dense):
        env.reset(task(REACH, 2))
    reach.start(2)
    for _ in range(100):
        goal, hand = sparse.state[-3:], sparse.state[:3]
        action = HOLD_OPEN.copy()
        action[:3] = np.clip(10 * (goal + [0, 0, 0.045] - hand), -1, 1)
        plain, shaped, own = sparse.step(action), dense.step(action), reach.step(to_metaworld(action))
        assert shaped.reward == pytest.approx(own.reward / 10)
        assert plain.reward == float(plain.success)
        assert plain.terminated == plain.success == shaped.success == own.success
        if plain.success:
            break
    assert plain.success
    assert shaped.reward > 0.9
    for env in (sparse, dense):
        env.close()


def test_an_episode_repeats_to_the_bit_whatever_ran_before(env):
    rng = np.random.default_rng(3)
    for task_id in (PUSH, DRAWER_OPEN):
        fresh = build(cameras=("agent", "wrist"))
        expected = fingerprint(fresh, task(task_id, 5))
        fresh.close()
        for other in (task(task_id, 31), task(REACH, 5), task(task_id, 12)):
            env.reset(other)
            for _ in range(60):
                env.step(np.append(rng.uniform(-1, 1, 6), rng.integers(2)).astype(np.float32))
        assert fingerprint(env, task(task_id, 5, seed=99)) == expected


def test_stepping_renders_nothing(env, monkeypatch):
    env.reset(task(REACH))
    monkeypatch.setattr(ModelRenderer, "render", lambda *_: pytest.fail("rendered"))
    for _ in range(5):
        env.step(HOLD_OPEN)


@pytest.mark.parametrize("name", ["reach-v3", "door-open-v3"])
def test_fifty_states_all_differ_and_lie_in_meta_worlds_own_space(name):
    simulator = Simulator(name)
    vectors = np.array([simulator._random_vector(index) for index in range(50)])
    space = simulator._sim._random_reset_space
    assert len(np.unique(vectors, axis=0)) == 50
    assert (vectors >= space.low).all()
    assert (vectors <= space.high).all()


def test_states_are_the_tasks_own_and_stay_what_they_are(reach):
    # Evaluations are compared across versions of vlarl: a state must not change.
    np.testing.assert_allclose(reach.start(0)[-3:], [0.009828, 0.870639, 0.076197], atol=1e-6)
    np.testing.assert_allclose(reach.start(0), reach.start(0), atol=0)
    push = Simulator("push-v3")
    assert np.abs(push._random_vector(0)[:2] - reach._random_vector(0)[:2]).max() > 1e-3


def test_the_goal_marker_is_rendered_where_the_goal_is_from_the_first_image_on(env):
    """Pixels of the marker's colour, more than the fingertips' four, move with the goal."""
    centres, goals = [], []
    for state in range(8):
        env.reset(task(PICK_PLACE, state))
        image = env.observe().images[0].astype(int)
        blue = (image[..., 2] > 120) & (image[..., 0] < 60) & (image[..., 1] < 60)
        assert blue.sum() >= 8
        centres.append(np.argwhere(blue).mean(axis=0))
        goals.append(env.state[-3:].copy())
    columns, x = np.array(centres)[:, 1], np.array(goals)[:, 0]
    rows, z = np.array(centres)[:, 0], np.array(goals)[:, 2]
    assert np.corrcoef(columns, x)[0, 1] < -0.98  # from the front, x grows to the left
    assert np.corrcoef(rows, z)[0, 1] < -0.8  # images are upright


def test_the_first_look_sees_what_the_reset_moved_last(env):
    env.reset(task(WINDOW_CLOSE, 6))
    state, seen = env.state, env.observe()
    env.step(HOLD_OPEN)
    np.testing.assert_allclose(env.state[4:7], state[4:7], atol=0.005)  # the window's handle
    changed = np.abs(env.observe().images[0].astype(int) - seen.images[0]).max(axis=-1) > 20
    assert changed.mean() < 0.02


def test_images_are_upright_from_every_camera():
    """The hand comes from above: the robot's red is in the upper half."""
    for exact in (False, True):
        env = build(exact_pixels=exact)
        for task_id in (REACH, DRAWER_OPEN):
            env.reset(task(task_id))
            image = env.observe().images[0].astype(int)
            red = (image[..., 0] > 90) & (image[..., 1] < 50) & (image[..., 2] < 50)
            assert np.argwhere(red)[:, 0].mean() < 32
        env.close()


def test_leaving_out_what_is_out_of_view_changes_no_pixel(env, monkeypatch):
    left_out = 0
    for task_id in range(10):
        env.reset(task(task_id, 4))
        quick = env.observe().images
        renderer = env._renderers[env.env_name]
        left_out += renderer._out_of_view(env._simulators[env.env_name].data).sum()
        with monkeypatch.context() as patch:
            patch.setattr(ModelRenderer, "_out_of_view", lambda self, data: np.zeros(self._model.ngeom, bool))
            np.testing.assert_array_equal(env.observe().images, quick)
    assert left_out > 100


def test_a_model_that_was_dropped_is_loaded_again_with_the_same_images(monkeypatch):
    monkeypatch.setattr(module, "MAX_SIMULATORS", 1)
    env = build()
    env.reset(task(REACH))
    first = env.observe()
    env.reset(task(PUSH))
    env.observe()
    assert list(env._simulators) == list(env._renderers) == ["push-v3"]
    env.reset(task(REACH))
    np.testing.assert_array_equal(env.observe().images, first.images)
    env.close()


def test_memory_stays_flat_over_many_episodes(env):
    def resident_mb() -> float:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def run(num_episodes: int) -> None:
        for episode in range(num_episodes):
            env.reset(task((REACH, DRAWER_OPEN)[episode % 2], episode % 50))
            if episode % 4 < 2:
                env.observe()

    run(20)
    before = resident_mb()
    run(200)
    assert resident_mb() - before < 8
