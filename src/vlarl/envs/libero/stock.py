"""LIBERO as its package runs it, two cameras rendered in every step: the baseline of `vlarl bench env`."""

from __future__ import annotations

from typing import Any

from vlarl.envs.libero.assets import find_assets, prepare
from vlarl.envs.libero.env import furniture_seed
from vlarl.envs.libero.suites import initial_states, problem_file
from vlarl.types import Task


def stock_env(task: Task, image_size: int, assets: str | None = None) -> Any:
    """A stock environment in the task's initial state; its process needs the variables of `LiberoFactory`."""
    prepare(find_assets(assets))
    from libero.libero.envs import OffScreenRenderEnv

    env = OffScreenRenderEnv(
        bddl_file_name=str(problem_file(task.suite, task.task_id)), camera_heights=image_size, camera_widths=image_size
    )
    restart(env, task)
    return env


def restart(env: Any, task: Task) -> Any:
    """Reset a stock environment of this task to its initial state, and return its observation."""
    env.seed(furniture_seed(task))
    env.reset()
    return env.set_init_state(initial_states(task.suite, task.task_id)[task.init_state])
