"""Every task of the four suites that published results are about: builds, begins, steps, and renders."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from vlarl.envs.libero import models
from vlarl.envs.libero.env import LiberoEnv
from vlarl.envs.libero.suites import libero_spec
from vlarl.types import Task

STAY = np.array([0, 0, 0, 0, 0, 0, 1], dtype=np.float32)


@pytest.fixture(scope="module")
def process(libero_assets: Path) -> Iterator[ProcessPoolExecutor]:
    """A process that compiles scenes by itself. That is quicker for scenes that are seen once, and takes much memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object", "libero_goal", "libero_10"])
def test_all_tasks_run(suite, process, libero_assets):
    process.submit(run_all_tasks, suite, libero_assets).result()


def run_all_tasks(suite: str, assets: Path) -> None:
    models.models_folder = lambda: None
    spec = libero_spec(suite, None)
    env = LiberoEnv(spec, assets, ("agent",), 48, exact_pixels=False)
    for task in spec.tasks:
        env.reset(Task(suite, task.task_id, 49, 0))
        outcome = env.step(STAY)
        seen = env.observe()
        assert not outcome.success, f"task {task.task_id} is solved before it begins"
        assert seen.instruction == task.instruction
        assert seen.images.std() > 20, f"task {task.task_id} is blank"
        base = env.simulator.sim.data.get_body_xpos("robot0_base")[2]
        assert 0.15 < seen.proprio[2] - base < 0.75, f"task {task.task_id}: the hand is not above the base"
        assert np.isfinite(seen.proprio).all()
    env.close()
