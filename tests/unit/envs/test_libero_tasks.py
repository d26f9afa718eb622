"""Every task of the four suites that published results are about: builds, begins, steps, and can be seen."""

import numpy as np
import pytest

from vlarl.envs.libero.env import LiberoEnv
from vlarl.envs.libero.suites import libero_spec
from vlarl.types import Task

STAY = np.array([0, 0, 0, 0, 0, 0, 1], dtype=np.float32)


@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object", "libero_goal", "libero_10"])
def test_all_tasks_run(suite, libero_assets):
    spec = libero_spec(suite, None)
    env = LiberoEnv(spec, libero_assets, ("agent",), 48, exact_pixels=False)
    try:
        for task in spec.tasks:
            env.reset(Task(suite, task.task_id, 49, 0))
            outcome = env.step(STAY)
            seen = env.observe()
            assert not outcome.success, f"task {task.task_id} is solved before it begins"
            assert seen.instruction == task.instruction
            assert seen.images.std() > 20, f"task {task.task_id} is blank"
            assert 0.15 < seen.proprio[2] - _base_height(env) < 0.75, "the hand is above the base"
            assert np.isfinite(seen.proprio).all()
    finally:
        env.close()


def _base_height(env: LiberoEnv) -> float:
    return float(env.simulator.sim.data.get_body_xpos("robot0_base")[2])
