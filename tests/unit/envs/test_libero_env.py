"""LIBERO as an environment: conventions, success, and episodes that do not depend on those before them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vlarl.envs.libero.env import LiberoEnv, proprio, simulator_action, upright
from vlarl.envs.libero.suites import initial_states, libero_spec
from vlarl.types import FloatArray, Observation, Task

SUITE = "libero_spatial"
OPEN, CLOSED = 1.0, 0.0


def make_env(assets: Path, cameras: tuple = ("agent", "wrist"), image_size: int = 64, exact: bool = False) -> LiberoEnv:
    return LiberoEnv(libero_spec(SUITE, None), assets, cameras, image_size, exact_pixels=exact)


@pytest.fixture(scope="module")
def env(libero_assets: Path) -> Iterator[LiberoEnv]:
    made = make_env(libero_assets)
    yield made
    made.close()


def task(init_state: int = 0, task_id: int = 0, seed: int = 0) -> Task:
    return Task(SUITE, task_id, init_state, seed)


def action(*movement: float, gripper: float) -> FloatArray:
    return np.array([*movement, *[0.0] * (6 - len(movement)), gripper], dtype=np.float32)


def same(first: Observation, second: Observation) -> bool:
    return np.array_equal(first.images, second.images) and np.array_equal(first.proprio, second.proprio)


def wander(env: LiberoEnv, seed: int, num_steps: int) -> Observation:
    """Move at random, down to the table, and observe."""
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        if step % 8 == 0:
            movement = rng.uniform(-1, 1, 7).astype(np.float32)
            movement[2] = -1.0
        env.step(movement)
    return env.observe()


def test_an_observation(env):
    env.reset(task())
    seen = env.observe()
    assert seen.images.shape == (2, 64, 64, 3) and seen.images.dtype == np.uint8 and seen.images.flags.c_contiguous
    assert seen.proprio.shape == (8,) and seen.proprio.dtype == np.float32
    assert seen.instruction == "pick up the black bowl between the plate and the ramekin and place it on the plate"
    assert seen.images.std(axis=(1, 2, 3)).min() > 20, "neither image is blank"
    assert np.abs(seen.images[0].astype(int) - seen.images[1]).mean() > 20, "the cameras differ"


def test_an_episode_begins_after_ten_settle_steps_with_the_gripper_open(env):
    env.reset(task(3))
    assert env.simulator.sim.data.time == pytest.approx(initial_states(SUITE, 0)[3][0] + 10 * 0.05)
    # LIBERO's states have the gripper half open at 0.021, 0.04 is wide open.
    assert env.observe().proprio[6] > 0.035 and env.observe().proprio[7] < -0.035


def test_the_gripper_closes_at_0_and_opens_at_1(env):
    env.reset(task())
    for _ in range(20):
        env.step(action(gripper=CLOSED))
    assert np.abs(env.observe().proprio[6:]).max() < 0.01
    for _ in range(20):
        env.step(action(gripper=OPEN))
    assert np.abs(env.observe().proprio[6:]).min() > 0.035


@pytest.mark.parametrize(("gripper", "sent"), [(1.0, -1.0), (0.0, 1.0), (0.9, -1.0), (0.1, 1.0), (0.5, 0.0)])
def test_the_gripper_s_sign(gripper, sent):
    given = np.array([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, gripper], dtype=np.float32)
    before = given.copy()
    given.flags.writeable = False
    converted = simulator_action(given)
    assert converted[6] == sent
    np.testing.assert_array_equal(converted[:6], before[:6].astype(np.float64))
    np.testing.assert_array_equal(given, before)


@pytest.mark.parametrize("bad", [np.zeros(6), np.zeros((1, 7)), np.array([0, 0, 0, 0, 0, 0, np.nan])])
def test_what_is_no_action_is_refused(env, bad):
    env.reset(task())
    with pytest.raises(ValueError, match="7 finite values"):
        env.step(bad.astype(np.float32))


@pytest.mark.parametrize(("axis", "delta"), [(0, 1.0), (1, -1.0), (2, 1.0)])
def test_the_hand_moves_where_it_is_sent(env, axis, delta):
    env.reset(task())
    before = env.observe().proprio[:3]
    movement = np.zeros(3)
    movement[axis] = delta
    for _ in range(8):
        env.step(action(*movement, gripper=OPEN))
    moved = env.observe().proprio[:3] - before
    assert moved[axis] * delta > 0.03 and np.delete(np.abs(moved), axis).max() < 0.02


def test_proprio_is_the_hand_s_pose_and_the_fingers(env):
    from scipy.spatial.transform import Rotation

    env.reset(task())
    for _ in range(12):
        env.step(action(0.5, 0.5, 0.2, 0.3, -0.5, 0.8, gripper=OPEN))
    for _ in range(40):  # come to rest: proprio is two substeps old
        env.step(action(gripper=OPEN))
    data, robot = env.simulator.sim.data, env.simulator.robots[0]
    felt = env.observe().proprio
    assert felt[:3] == pytest.approx(data.get_site_xpos("gripper0_grip_site"), abs=1e-3)
    orientation = data.get_body_xmat("robot0_right_hand").reshape(3, 3)
    assert Rotation.from_rotvec(felt[3:6]).as_matrix() == pytest.approx(orientation, abs=5e-3)
    assert np.linalg.norm(felt[3:6]) > 1.0
    assert felt[6:] == pytest.approx(data.qpos[robot._ref_gripper_joint_pos_indexes], abs=1e-3)


@pytest.mark.parametrize(
    ("quaternion", "rotation"),
    [
        ([1.0, 0, 0, 0], [0, 0, 0]),
        ([np.cos(0.4), 0, np.sin(0.4), 0], [0, 0.8, 0]),
        ([0.0, 1.0, 0, 0], [np.pi, 0, 0]),
        (
            [-np.cos(0.4), 0, 0, np.sin(0.4)],
            [0, 0, 2 * np.pi - 0.8],
        ),  # not the shorter way round: as OpenVLA-OFT has it
        ([1.0 + 1e-9, 0, 0, 0], [0, 0, 0]),
    ],
)
def test_axis_angle(quaternion, rotation):
    felt = proprio(np.array([1.0, 2, 3]), np.array(quaternion), np.array([4.0, 5]))
    assert felt == pytest.approx([1, 2, 3, *rotation, 4, 5], abs=1e-6)


def test_images_are_rotated_by_180_degrees():
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    turned = upright(pixels)
    np.testing.assert_array_equal(turned[:, :, 0], [[9, 6], [3, 0]])
    assert turned.flags.c_contiguous


def test_a_video_shows_what_the_policy_sees(env):
    env.reset(task())
    frame = env.frame()
    assert frame.shape == (256, 256, 3) and frame.dtype == np.uint8
    small = frame.reshape(64, 4, 64, 4, 3).mean(axis=(1, 3))
    seen = env.observe().images[0].astype(float)
    assert np.abs(small - seen).mean() < 4
    assert min(np.abs(small - other).mean() for other in (seen[::-1], seen[:, ::-1], seen[::-1, ::-1])) > 12


def test_success_is_rewarded_once_the_bowl_is_on_the_plate(env):
    env.reset(task())
    outcome = env.step(action(gripper=OPEN))
    assert (outcome.reward, outcome.terminated, outcome.truncated, outcome.success) == (0.0, False, False, False)
    sim = env.simulator.sim
    plate = sim.data.get_body_xpos("plate_1_main")
    bowl = env.simulator.get_object("akita_black_bowl_1").joints[-1]
    sim.data.set_joint_qpos(bowl, np.array([*plate[:2], plate[2] + 0.05, 1, 0, 0, 0]))
    sim.data.set_joint_qvel(bowl, np.zeros(6))
    outcomes = [env.step(action(gripper=OPEN)) for _ in range(4)]
    landed = next(outcome for outcome in outcomes if outcome.success)
    assert (landed.reward, landed.terminated, landed.truncated) == (1.0, True, False)
    assert not outcomes[0].success, "it falls first"


def test_a_group_s_episodes_begin_alike_and_other_states_differ(env):
    env.reset(task(31, seed=1))
    first = env.observe()
    env.reset(task(31, seed=2))
    assert same(first, env.observe())
    env.reset(task(32, seed=1))
    assert not same(first, env.observe())


def test_an_episode_does_not_depend_on_those_before_it(env, libero_assets):
    # Task 4 has an open drawer, which LIBERO sets by random numbers.
    fresh = make_env(libero_assets)
    fresh.reset(task(7, task_id=4))
    first, last = fresh.observe(), wander(fresh, seed=5, num_steps=24)
    positions = fresh.simulator.sim.data.qpos.copy()
    fresh.close()

    env.reset(task(9, task_id=4))
    wander(env, seed=6, num_steps=40)
    for _ in range(10):  # the gripper remembers how far it is closed
        env.step(action(gripper=CLOSED))
    env.reset(task(3, task_id=1))
    wander(env, seed=7, num_steps=8)
    env.reset(task(2, task_id=4))
    env.step(action(0.3, gripper=CLOSED))
    env.simulator.sim.model.body_pos[:] += 0.02  # LIBERO moves furniture by writing to the model
    env.simulator.sim.model.site_rgba[:, 3] = 1.0  # and makes objects glow
    env.reset(task(7, task_id=4, seed=99))
    assert same(first, env.observe())
    assert same(last, wander(env, seed=5, num_steps=24))
    np.testing.assert_array_equal(env.simulator.sim.data.qpos, positions)


def test_steps_render_nothing(env):
    env.reset(task())
    render = env._renderer.render
    try:
        env._renderer.render = None
        env.step(action(gripper=OPEN))
        env.reset(task(1))
    finally:
        env._renderer.render = render


def test_a_simulation_that_blows_up_is_an_error_and_leaves_no_file(env, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env.reset(task())
    env.simulator.sim.data.qvel[0] = np.nan
    with pytest.raises(RuntimeError, match="MuJoCo gave up the simulation"):
        env.step(action(gripper=OPEN))
    assert list(tmp_path.iterdir()) == []
    env.reset(task())
    env.step(action(gripper=OPEN))


def test_tasks_that_are_not_there_are_refused(env):
    for wrong in (task(50), task(task_id=10), Task("libero_goal", 0, 0, 0)):
        with pytest.raises(ValueError, match="libero_spatial"):
            env.reset(wrong)


def test_an_environment_that_was_never_reset(libero_assets):
    fresh = make_env(libero_assets)
    try:
        with pytest.raises(RuntimeError, match="reset the environment first"):
            fresh.observe()
    finally:
        fresh.close()
        fresh.close()  # twice is once


def test_fast_images_are_nearly_the_exact_ones(env, libero_assets):
    exact = make_env(libero_assets, exact=True)
    images = []
    for each in (env, exact):
        each.reset(task(5))
        images.append(each.observe().images.astype(int))
    exact.close()
    agent, wrist = np.abs(images[0] - images[1]).mean(axis=(1, 2, 3))
    assert 1 < wrist < 6 and 1 < agent < 6
