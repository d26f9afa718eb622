"""Episodes of LiberoEnv against hf-libero's own environment: physics, sensors and images are equal to the bit."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from vlarl.envs.libero.env import LiberoEnv
from vlarl.envs.libero.suites import libero_spec
from vlarl.types import Task

CANS = Task("libero_object", 2, 7, 0)  # loose objects on the floor: the solver's memory shows in the last bits
STOVE = Task("libero_goal", 7, 7, 0)  # it glows when it is on
IMAGE_SIZE = 64
NUM_STEPS = 12
POKE = 4  # before this step the stove's knob is turned by hand
LOOK = (0, 3, 5, 6, 11)

# hf-libero as its users run it, in a process of its own: its OpenGL context conflicts with others.
STOCK = """
import sys
import numpy as np
from vlarl.envs.libero.assets import find_assets, prepare
from vlarl.envs.libero.env import NUM_SETTLE_STEPS, SETTLE_ACTION, simulator_action
from vlarl.envs.libero.stock import restart, stock_env
from vlarl.envs.libero.suites import problem_file
from vlarl.types import Task

out, actions, task = sys.argv[1], np.load(sys.argv[2]), Task(sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), 0)
image_size, poke = int(sys.argv[6]), int(sys.argv[7])
if image_size:
    env = stock_env(task, image_size)
else:  # physics alone is quicker
    prepare(find_assets(None))
    from libero.libero.envs import OffScreenRenderEnv
    env = OffScreenRenderEnv(bddl_file_name=str(problem_file(task.suite, task.task_id)), use_camera_obs=False)
    restart(env, task)
for _ in range(NUM_SETTLE_STEPS):
    env.step(SETTLE_ACTION)
rows = []
for number, action in enumerate(actions):
    if number == poke:
        env.sim.data.set_joint_qpos("flat_stove_1_button", 1.0)
    seen, reward, done, _ = env.step(simulator_action(action))
    images = {name: image for name, image in seen.items() if name.endswith("_image")}
    robot = {name: seen["robot0_" + name] for name in ("eef_pos", "eef_quat", "gripper_qpos")}
    rows.append({"qpos": env.sim.data.qpos.copy(), "reward": reward, "done": done, **images, **robot})
np.savez(out, **{name: np.stack([row[name] for row in rows]) for name in rows[0]})
env.close()
"""


def actions() -> np.ndarray:
    """[NUM_STEPS, 7] of a policy."""
    rng = np.random.default_rng(4)
    chunks = rng.uniform(-1, 1, (NUM_STEPS // 4, 7)).astype(np.float32)
    chunks[:, 2] = -1.0  # down to the table: contacts
    chunks[:, 6] = [1, 0, 1]
    return np.repeat(chunks, 4, axis=0)


def stock_episode(task: Task, image_size: int, poke: int, folder: Path) -> dict[str, np.ndarray]:
    """The states of hf-libero's environment, by name, one entry per step."""
    np.save(folder / "actions.npy", actions())
    values = [str(value) for value in (task.task_id, task.init_state, image_size, poke)]
    arguments = [str(folder / "out.npz"), str(folder / "actions.npy"), task.suite, *values]
    subprocess.run([sys.executable, "-c", STOCK, *arguments], env=dict(os.environ), check=True, timeout=500)
    return dict(np.load(folder / "out.npz"))


@pytest.fixture
def make_env(libero_assets: Path) -> Iterator[Callable[[str], LiberoEnv]]:
    """Environments of a suite with stock images, closed in the end."""
    made: list[LiberoEnv] = []

    def make(suite: str) -> LiberoEnv:
        made.append(
            LiberoEnv(libero_spec(suite, None), libero_assets, ("agent", "wrist"), IMAGE_SIZE, exact_pixels=True)
        )
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_physics_and_images_equal_stock_libero_to_the_bit(make_env, tmp_path):
    from robosuite.utils.transform_utils import quat2axisangle

    env = make_env(STOVE.suite)
    stock = stock_episode(STOVE, IMAGE_SIZE, POKE, tmp_path)
    env.reset(STOVE)
    for step, action in enumerate(actions()):
        if step == POKE:
            env.simulator.sim.data.set_joint_qpos("flat_stove_1_button", 1.0)
        outcome = env.step(action)
        np.testing.assert_array_equal(env.simulator.sim.data.qpos, stock["qpos"][step], err_msg=f"step {step}")
        assert (outcome.reward, outcome.success) == (stock["reward"][step], stock["done"][step])
        if step in LOOK:
            seen = env.observe()
            for image, name in zip(seen.images, ("agentview_image", "robot0_eye_in_hand_image"), strict=True):
                np.testing.assert_array_equal(image, stock[name][step][::-1, ::-1], err_msg=f"{name} {step}")
            rotation = quat2axisangle(stock["eef_quat"][step].copy())
            parts = [stock["eef_pos"][step], rotation, stock["gripper_qpos"][step]]
            np.testing.assert_array_equal(seen.proprio, np.concatenate(parts).astype(np.float32))
    assert stock["done"].tolist() == [step >= POKE for step in range(NUM_STEPS)], "the stove is on"


def test_loose_objects_move_as_in_stock_libero_to_the_bit(make_env, tmp_path):
    env = make_env(CANS.suite)
    stock = stock_episode(CANS, 0, -1, tmp_path)
    env.reset(CANS)
    for step, action in enumerate(actions()):
        env.step(action)
        np.testing.assert_array_equal(env.simulator.sim.data.qpos, stock["qpos"][step], err_msg=f"step {step}")
    assert np.abs(np.diff(stock["qpos"], axis=0)).max() > 0.01, "something moved"
