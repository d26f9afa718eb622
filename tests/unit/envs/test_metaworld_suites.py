"""Meta-World's tables: equal to the package's, read without loading it."""

import importlib
import pickle
import subprocess
import sys

import pytest

from vlarl.config.known import SUITES
from vlarl.config.metaworld_tasks import METAWORLD_TASKS
from vlarl.config.schema import EnvConfig
from vlarl.envs import metaworld as module
from vlarl.envs.metaworld import metaworld_factory
from vlarl.envs.metaworld.suites import INSTRUCTIONS, metaworld_spec
from vlarl.envs.metaworld.views import FRONT, OPEN_TABLE, SIDE, STOCK, WRIST, view_of
from vlarl.errors import MissingExtraError


def test_tasks_and_their_order_are_those_of_the_package():
    from metaworld import env_dict as package

    assert {name: list(tasks) for name, tasks in METAWORLD_TASKS.items()} == {
        "metaworld_mt10": list(package.MT10_V3),
        "metaworld_mt25": list(package.MT25_V3),
        "metaworld_mt50": list(package.MT50_V3),
        "metaworld_ml10": list(package.ML10_V3["train"]),
        "metaworld_ml10_test": list(package.ML10_V3["test"]),
        "metaworld_ml25": list(package.ML25_V3["train"]),
        "metaworld_ml25_test": list(package.ML25_V3["test"]),
        "metaworld_ml45": list(package.ML45_V3["train"]),
        "metaworld_ml45_test": list(package.ML45_V3["test"]),
    }
    assert set(package.ALL_V3_ENVIRONMENTS) >= OPEN_TABLE


def test_the_configuration_knows_the_same_suites():
    known = {name: facts.num_tasks for name, facts in SUITES.items() if name.startswith("metaworld_")}
    assert known == {name: len(tasks) for name, tasks in METAWORLD_TASKS.items()}


def test_every_task_has_an_instruction_of_its_own():
    assert set(INSTRUCTIONS) == set(METAWORLD_TASKS["metaworld_mt50"])
    assert len(set(INSTRUCTIONS.values())) == 50


def test_a_suite_in_full():
    spec = metaworld_spec("metaworld_ml10_test")
    assert [task.task_id for task in spec.tasks] == [0, 1, 2, 3, 4]
    assert [task.instruction for task in spec.tasks] == [
        "open the green drawer",
        "close the door of the safe",
        "put the blue block on the shelf",
        "sweep the block into the hole",
        "pull the lever up to the red marker",
    ]
    assert {task.max_steps for task in spec.tasks} == {500}
    assert (spec.action_dim, spec.proprio_dim) == (7, 8)
    assert spec.train_states == tuple(range(30))
    assert spec.eval_states == tuple(range(30, 50))
    assert spec.benchmark_states == tuple(range(50))


def test_the_configured_time_limit_replaces_the_suites():
    assert {task.max_steps for task in metaworld_spec("metaworld_mt10", 80).tasks} == {80}


def test_a_factory_says_everything_without_the_simulator():
    code = """
import sys
from vlarl.config.schema import EnvConfig
from vlarl.envs.metaworld import metaworld_factory
factory = metaworld_factory(EnvConfig(suite="metaworld_mt50", cameras=("agent", "wrist")), 64, "sparse")
print(factory.image_shape, len(factory.spec.tasks), sorted({"mujoco", "metaworld", "torch"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(2, 64, 64, 3) 50 []\n"


def test_a_factory_is_made_again_where_environments_were_loaded():
    importlib.import_module(
        "vlarl.envs.metaworld.env"
    )  # its modules become names of the package, and must hide nothing
    assert metaworld_factory(EnvConfig(suite="metaworld_mt10", cameras=("wrist",)), 64, "sparse").cameras == ("wrist",)


def test_a_factory_survives_pickling():
    factory = metaworld_factory(EnvConfig(suite="metaworld_mt10", max_steps=70), 56, "dense")
    assert pickle.loads(pickle.dumps(factory)) == factory


def test_a_missing_package_is_reported_with_its_remedy(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"metaworld is not installed; in your clone of vlarl run: .* '\.\[metaworld\]'"
    ):
        metaworld_factory(EnvConfig(suite="metaworld_mt10"), 64, "sparse")


@pytest.mark.parametrize(
    ("config", "shell", "expected"),
    [
        ({}, None, {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"}),
        ({}, "osmesa", {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"}),
        ({"render": "egl"}, "osmesa", {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"}),
        ({"render": "glx"}, None, {"MUJOCO_GL": "glx"}),
        ({"render_gpu": 3}, None, {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "MUJOCO_EGL_DEVICE_ID": "3"}),
    ],
)
def test_the_render_backend_reaches_the_process(monkeypatch, config, shell, expected):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    if shell is not None:
        monkeypatch.setenv("MUJOCO_GL", shell)
    factory = metaworld_factory(EnvConfig(suite="metaworld_mt10", **config), 64, "sparse")
    assert factory.variables(5) == expected | {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}


def test_where_the_cameras_stand():
    assert view_of("reach-v3", "agent", exact_pixels=False) == FRONT
    assert view_of("drawer-open-v3", "agent", exact_pixels=False) == SIDE
    assert view_of("reach-v3", "agent", exact_pixels=True) == STOCK
    assert view_of("reach-v3", "wrist", exact_pixels=False) == view_of("reach-v3", "wrist", exact_pixels=True) == WRIST
