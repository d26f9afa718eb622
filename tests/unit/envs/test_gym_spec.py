"""From section gym to a suite and a factory: the environment is tried out in a process of its own."""

import pickle
import sys

import numpy as np
import pytest

from vlarl.config.problems import ConfigError
from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.envs.base import SuiteSpec
from vlarl.envs.gym.env import GymFactory, gym_factory, gym_spec
from vlarl.envs.gym.probe import call_env, probe
from vlarl.envs.gym.source import make_env
from vlarl.envs.mujoco import render_backend, render_variables
from vlarl.envs.process_pool import WorkerPool
from vlarl.errors import UsageError
from vlarl.types import Task

REACH = GymConfig(
    env="fakes.gym_envs:Reach",
    images=("pixels.front", "render"),
    proprio=("state", "goal"),
    instructions=("go to the right goal", "go to the left goal"),
    task_option="task",
)
ENV = EnvConfig(suite="gym", max_steps=12)


def changed(**options: object) -> GymConfig:
    return REACH.model_copy(update=options)


def probed(config: GymConfig, max_steps: int | None) -> SuiteSpec:
    return probe(call_env(config, "making it", lambda: make_env(config, max_steps)), config, max_steps)


@pytest.fixture(scope="module")
def factory() -> GymFactory:
    return gym_factory(REACH, ENV, 16, "sparse")


def test_the_suite_follows_from_the_environment(factory):
    spec = factory.spec
    assert spec.name == "gym" and (spec.action_dim, spec.proprio_dim) == (2, 4)
    assert [(t.task_id, t.instruction, t.max_steps) for t in spec.tasks] == [
        (0, "go to the right goal", 12),
        (1, "go to the left goal", 12),
    ]
    assert spec.train_states == tuple(range(30))
    assert spec.eval_states == spec.benchmark_states == tuple(range(30, 50))
    assert factory.image_shape == (2, 16, 16, 3)


def test_the_environment_is_never_made_in_the_callers_process():
    config = changed(env="fakes.gym_envs:dies")
    with pytest.raises(UsageError, match=r"gym.env = 'fakes.gym_envs:dies': its process ended with exit code 9"):
        gym_spec(config, 12)


def test_an_environment_that_exits_is_refused_with_what_it_said():
    with pytest.raises(UsageError, match=r"making it called sys.exit\('no licence'\) \(gym_envs.py, line \d+\)"):
        gym_spec(changed(env="fakes.gym_envs:exits"), 12)


@pytest.mark.parametrize("fault", ["close raises", "close hangs"])
def test_an_environment_that_does_not_close_holds_nothing_up(fault, tmp_path):
    kwargs = {"fault": fault, "diary": str(tmp_path)}
    spec = gym_spec(changed(env="fuzz.fault_envs:Faulty", kwargs=kwargs, images=("pixels.front",)), 12, timeout_s=60)
    assert spec.action_dim == 2


def test_an_environment_that_hangs_is_given_up():
    with pytest.raises(UsageError, match=r"was not ready within env.timeout_s = 2 s; raise that if it is only slow"):
        gym_spec(changed(env="fakes.gym_envs:hangs"), 12, timeout_s=2.0)


def test_its_process_has_the_variables_and_the_search_path(tmp_path, monkeypatch):
    (tmp_path / "own_env.py").write_text(
        "import os\n"
        "from fakes.gym_envs import Reach\n"
        "def make():\n"
        "    assert os.environ['MUJOCO_GL'] == 'osmesa', os.environ.get('MUJOCO_GL')\n"
        "    print('noise on stdout')\n"
        "    return Reach()\n"
    )
    monkeypatch.chdir(tmp_path)
    made = gym_factory(changed(env="own_env:make"), EnvConfig(max_steps=3, render="osmesa"), 8, "sparse")
    assert made.spec.tasks[0].max_steps == 3 and made.variables(0)["MUJOCO_GL"] == "osmesa"
    assert "own_env" not in sys.modules


def test_variables_of_mujoco(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    threads = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}
    assert render_variables(render_backend("auto"), None, pyopengl=False) == {"MUJOCO_GL": "egl", **threads}
    assert render_variables(render_backend("osmesa"), 2, pyopengl=False) == {
        "MUJOCO_GL": "osmesa",
        "MUJOCO_EGL_DEVICE_ID": "2",
        **threads,
    }
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    assert render_backend("auto") == "glfw" and render_backend("egl") == "egl"


def test_variables_of_its_process(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    made = gym_factory(changed(), EnvConfig(max_steps=3, render_gpu=2), 8, "sparse")
    threads = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}
    assert made.variables(0) == {"MUJOCO_GL": "glfw", "MUJOCO_EGL_DEVICE_ID": "2", **threads}


def test_it_runs_in_a_worker(factory):
    assert pickle.loads(pickle.dumps(factory)) == factory
    pool = WorkerPool(factory, 1, timeout_s=60)
    try:
        task = Task("gym", 1, 31, seed=5)
        (first,) = pool.reset([0], [task])
        assert first.instruction == "go to the left goal" and first.images.shape == (2, 16, 16, 3)
        (outcome,) = pool.step_chunk([0], np.zeros((1, 20, 2), np.float32))
        assert outcome.error is None and outcome.num_executed <= 12
    finally:
        pool.close()
    env = factory.build()
    env.reset(task)
    np.testing.assert_array_equal(env.observe().proprio, first.proprio)


def test_there_is_no_expert(factory):
    with pytest.raises(UsageError, match="no scripted expert"):
        factory.build_expert(factory.build())


def test_few_states_are_divided_too():
    spec = probed(changed(num_states=2), 5)
    assert spec.train_states == (0,) and spec.eval_states == (1,)


def test_the_instruction_of_an_environment_that_tells_it():
    spec = probed(changed(instructions=("info.instruction",)), 5)
    assert [task.instruction for task in spec.tasks] == ["go to the right goal"]


def test_a_time_limit_is_needed_and_that_of_an_id_is_replaced():
    with pytest.raises(UsageError, match="env.max_steps = null: the environment has no time limit of its own; set one"):
        probed(REACH, None)
    reacher = GymConfig(env="Reacher-v5", images=("observation",), success="terminated")
    env = GymFactory(probed(REACH, 3), (1, 4, 4, 3), reacher, 3, "sparse").build()
    env.reset(Task("gym", 0, 0, 0))
    assert [env.step(np.zeros(2, np.float32)).truncated for _ in range(3)] == [False, False, True]
    env.close()


def test_everything_that_is_wrong_is_said_at_once():
    config = changed(
        images=("pixels.back",), proprio=("speed",), instructions=("info.goal",), success="info.won", actions=(0,)
    )
    with pytest.raises(ConfigError) as caught:
        probed(config, None)
    assert [str(problem) for problem in caught.value.problems] == [
        "gym.images = 'pixels.back': the observation's 'pixels' has no 'back'; it has front",
        "gym.proprio = 'speed': the observation has no 'speed'; it has pixels, state, goal",
        "gym.instructions = 'info.goal': info has no 'goal'; it has instruction",
        "gym.actions = [0]: names 1 dimensions, the environment takes 2: Box([-0.1 -0.2], [0.3 0.2], (2,), float32)",
        "env.max_steps = null: the environment has no time limit of its own; set one",
    ]
    with pytest.raises(UsageError, match="gym.success = 'info.won': info has no 'won'; it has success"):
        probed(changed(success="info.won"), 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"env": "no_such_module:make"},
            "gym.env = 'no_such_module:make': can't import the module 'no_such_module': No module named 'no_such_module'; run from the folder that holds it, or put that folder on PYTHONPATH",
        ),
        ({"env": "fakes.gym_envs:Reech"}, "there is no 'Reech' in 'fakes.gym_envs'; did you mean 'Reach'?"),
        ({"env": "fakes.gym_envs:zzz"}, "there is no 'zzz' in 'fakes.gym_envs'; it has "),
        (
            {"env": "fakes.gym_envs:not_callable"},
            "'not_callable' is int; it must be a class or function that makes an environment",
        ),
        (
            {"env": "fakes.gym_envs:fails"},
            "making it raised RuntimeError: no robot at this address (gym_envs.py, line ",
        ),
        ({"env": "fakes.gym_envs:returns_nothing"}, "returned NoneType, not a gymnasium.Env"),
        ({"env": "fakes.gym_envs:discrete"}, "its action space is Discrete(4)"),
        ({"env": "fakes.gym_envs:discrete"}, "and name that: --gym.env my_module:make"),
        (
            {"env": "fakes.gym_envs:renders_with_a_missing_package"},
            "render raised DependencyNotInstalled: pygame is not installed, run `pip install pygame`",
        ),
        ({"env": "fakes.gym_envs:Reach", "kwargs": {"colour": 1}}, "making it raised TypeError: "),
        (
            {"env": "NoSuchEnv-v0"},
            "gym.env = 'NoSuchEnv-v0': Gymnasium can't make it: Environment `NoSuchEnv` doesn't exist",
        ),
        (
            {"kwargs": {"fault": "renders nothing"}},
            "gym.images = 'render': render() returned nothing; make the environment with render_mode='rgb_array'",
        ),
        ({"kwargs": {"fault": "no success"}}, "gym.success = 'info.success': info has no 'success'; it has nothing"),
    ],
)
def test_what_cant_be_used_is_refused_with_the_reason(options, message):
    with pytest.raises(UsageError) as caught:
        probed(changed(**options), 5)
    assert message in str(caught.value)


def test_an_environment_that_raises_in_reset_or_step_says_where():
    with pytest.raises(UsageError, match=r"reset raised KeyError: 'task' \(gym_envs.py, line \d+\)"):
        probed(changed(env="fakes.gym_envs:raises_in_reset"), 5)
    with pytest.raises(UsageError, match=r"step raised KeyError: 'motor' \(gym_envs.py, line \d+\)"):
        probed(changed(env="fakes.gym_envs:raises_in_step"), 5)


def test_an_id_in_a_module_that_registers_it(tmp_path, monkeypatch):
    (tmp_path / "registers.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('vlarl_test/Reach-v0', entry_point='fakes.gym_envs:Reach', max_episode_steps=9)\n"
    )
    monkeypatch.chdir(tmp_path)
    spec = gym_spec(changed(env="registers:vlarl_test/Reach-v0"), None)
    assert spec.tasks[0].max_steps == 9
