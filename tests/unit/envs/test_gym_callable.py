"""An environment that was given in Python, made in other processes than the one that defines it."""

from contextlib import closing

import numpy as np
import pytest
from fakes.gym_envs import Reach

from vlarl.config.schema import Config
from vlarl.config.source.load import load_config
from vlarl.envs.build import build_pool
from vlarl.envs.gym.env import gym_spec
from vlarl.errors import UsageError
from vlarl.types import Task


def configured(env: object) -> Config:
    options = {
        "env.suite": "gym",
        "env.max_steps": 9,
        "gym.env": env,
        "gym.instructions": ["go to the goal"],
        "gym.actions": [0, 1],
        "gym.success": "terminated",
        "policy.path": "init:tiny-oft",
    }
    return load_config(Config(), options)


@pytest.mark.slow
def test_a_function_of_this_process_makes_environments_in_others():
    rendered = "rgb_array"  # what the function closes over goes with it
    config = configured(lambda: Reach(render_mode=rendered))
    with closing(build_pool(config.env, config.gym, 1, 80, "sparse")) as pool:
        assert pool.spec.name == "gym" and pool.spec.tasks[0].instruction == "go to the goal"
        (seen,) = pool.reset([0], [Task("gym", 0, 3, 0)])
        env = Reach()
        env.reset(seed=3)
        np.testing.assert_array_equal(seen.images[0], env.render())


class Unreadable:
    """Can be pickled, but not unpickled in the other process."""

    def __reduce__(self):
        return int, ("not a number",)


@pytest.mark.slow
def test_one_that_another_process_cannot_read_says_so():
    broken = Unreadable()
    config = configured(lambda: broken)
    with pytest.raises(
        UsageError, match=r"given in Python cannot be made in another process \(ValueError: .*in a module"
    ):
        gym_spec(config.gym, 9)


def test_a_configuration_from_a_file_requires_it():
    config = configured("python:mine.make_env")
    with pytest.raises(UsageError, match=r"gym.env = 'python:mine.make_env' was given as a callable in Python"):
        gym_spec(config.gym, 9)
