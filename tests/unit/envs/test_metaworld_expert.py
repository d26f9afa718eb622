"""Meta-World's scripted policies solve their tasks through our environment and our actions."""

import warnings

import pytest

from vlarl.config.schema import EnvConfig
from vlarl.envs.metaworld import metaworld_factory
from vlarl.types import Task

FACTORY = metaworld_factory(EnvConfig(suite="metaworld_mt10"), 64, "sparse")


@pytest.fixture(scope="module")
def env():
    env = FACTORY.build()
    yield env
    env.close()


@pytest.mark.parametrize("task_id", [0, 1, 2], ids=["reach", "push", "pick-place"])
@pytest.mark.parametrize("state", [0, 17, 33, 49, 1000])
def test_the_expert_succeeds(env, task_id, state):
    expert = FACTORY.build_expert(env)
    env.reset(Task("metaworld_mt10", task_id, state, 0))
    expert.reset()
    for _ in range(100):
        action = expert.act()
        assert action.shape == (7,)
        assert abs(action[:3]).max() <= 1
        assert 0 <= action[6] <= 1
        if env.step(action).success:
            return
    pytest.fail("no success within 100 steps")


def test_one_expert_follows_its_environment_to_another_task_and_warns_of_nothing(env):
    expert = FACTORY.build_expert(env)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for task_id in (8, 2):
            env.reset(Task("metaworld_mt10", task_id, 3, 0))
            expert.reset()
            assert any(env.step(expert.act()).success for _ in range(120))
