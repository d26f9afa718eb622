"""Episodes of LiberoEnv against hf-libero's own environment: physics, sensors and pictures are equal to the bit."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vlarl.envs.libero.env import LiberoEnv
from vlarl.envs.libero.suites import libero_spec
from vlarl.types import Task

TASK = Task("libero_goal", 7, 7, 0)  # turn on the stove
IMAGE_SIZE = 64
NUM_STEPS = 12
POKE = 4  # before this step the stove's knob is turned by hand
LOOK = (0, 3, 5, 6, 11)

# hf-libero as anybody would run it, in a process of its own: its OpenGL context does not like company.
STOCK = """
import sys
import numpy as np
from vlarl.envs.libero.env import NUM_SETTLE_STEPS, SETTLE_ACTION, simulator_action
from vlarl.envs.libero.stock import stock_env
from vlarl.types import Task
out, size, poke = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
actions = np.load(sys.argv[4])
env = stock_env(Task("libero_goal", 7, 7, 0), size)
for _ in range(NUM_SETTLE_STEPS):
    env.step(SETTLE_ACTION)
rows = []
for number, action in enumerate(actions):
    if number == poke:
        env.sim.data.set_joint_qpos("flat_stove_1_button", 1.0)
    seen, reward, done, _ = env.step(simulator_action(action))
    rows.append((env.sim.data.qpos.copy(), reward, done, seen))
names = ("agentview_image", "robot0_eye_in_hand_image", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
arrays = {name: np.stack([row[3][name] for row in rows]) for name in names}
np.savez(out, qpos=[row[0] for row in rows], reward=[row[1] for row in rows], done=[row[2] for row in rows], **arrays)
env.close()
"""


def actions() -> np.ndarray:
    rng = np.random.default_rng(4)
    chunks = rng.uniform(-1, 1, (NUM_STEPS // 4, 7)).astype(np.float32)
    chunks[:, 2] = -1.0  # down to the table: contacts
    chunks[:, 6] = [1, 0, 1]
    return np.repeat(chunks, 4, axis=0)


@pytest.fixture(scope="module")
def stock(libero_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("stock")
    np.save(folder / "actions.npy", actions())
    arguments = [str(folder / "out.npz"), str(IMAGE_SIZE), str(POKE), str(folder / "actions.npy")]
    environment = {**os.environ, "MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"}
    subprocess.run([sys.executable, "-c", STOCK, *arguments], env=environment, check=True, timeout=300)
    return dict(np.load(folder / "out.npz"))


def test_an_episode_equals_stock_libero_to_the_bit(stock, libero_assets):
    from robosuite.utils.transform_utils import quat2axisangle

    env = LiberoEnv(libero_spec(TASK.suite, None), libero_assets, ("agent", "wrist"), IMAGE_SIZE, exact_pixels=True)
    env.reset(TASK)
    for number, action in enumerate(actions()):
        if number == POKE:
            env.simulator.sim.data.set_joint_qpos("flat_stove_1_button", 1.0)
        outcome = env.step(action)
        np.testing.assert_array_equal(env.simulator.sim.data.qpos, stock["qpos"][number], err_msg=f"step {number}")
        assert (outcome.reward, outcome.success) == (stock["reward"][number], stock["done"][number])
        if number in LOOK:
            seen = env.observe()
            for image, name in zip(seen.images, ("agentview_image", "robot0_eye_in_hand_image"), strict=True):
                np.testing.assert_array_equal(image, stock[name][number][::-1, ::-1], err_msg=f"{name} {number}")
            rotation = quat2axisangle(stock["robot0_eef_quat"][number].copy())
            parts = [stock["robot0_eef_pos"][number], rotation, stock["robot0_gripper_qpos"][number]]
            np.testing.assert_array_equal(seen.proprio, np.concatenate(parts).astype(np.float32))
    env.close()
    assert stock["done"].tolist() == [number >= POKE for number in range(NUM_STEPS)], "the stove is on"
    assert np.abs(np.diff(stock["qpos"], axis=0)).max() > 0.01, "something moved"
