"""LIBERO's suites as vlarl reads them, against the package's own benchmark."""

import io
import os
import pickle
import subprocess
import sys
from importlib import import_module, util
from pathlib import Path

import numpy as np
import pytest
import torch

from vlarl.config.schema import EnvConfig
from vlarl.envs.libero import KNOWN_GOOD_MUJOCO, libero_factory, mujoco_problem
from vlarl.envs.libero import suites as libero_suites
from vlarl.envs.libero.assets import prepare
from vlarl.envs.libero.suites import initial_states, libero_spec, problem_file, task_names
from vlarl.errors import UsageError

LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}


@pytest.fixture(scope="module")
def benchmark(libero_assets: Path):
    """hf-libero's own benchmark module."""
    prepare(libero_assets)
    return import_module("libero.libero.benchmark")


@pytest.mark.parametrize("suite", LIMITS)
def test_tasks_are_the_benchmark_s_in_its_order(suite, benchmark):
    theirs = benchmark.get_benchmark(suite)()
    ours = libero_spec(suite, None)
    assert [task.instruction for task in ours.tasks] == [task.language for task in theirs.tasks]
    assert [problem_file(suite, task.task_id).name for task in ours.tasks] == [task.bddl_file for task in theirs.tasks]
    assert [task.task_id for task in ours.tasks] == list(range(theirs.n_tasks))
    assert {task.max_steps for task in ours.tasks} == {LIMITS[suite]}
    assert all(problem_file(suite, task.task_id).is_file() for task in ours.tasks)


def test_instructions_leave_out_the_scene():
    assert libero_spec("libero_10", None).tasks[2].instruction == "turn on the stove and put the moka pot on it"
    assert libero_spec("libero_90", None).tasks[0].instruction.startswith("close the top drawer")
    assert "SCENE10" in task_names("libero_90")[1], "a scene with two digits"
    assert libero_spec("libero_90", None).tasks[1].instruction[0].islower()


@pytest.mark.parametrize(("suite", "task_id"), [("libero_spatial", 4), ("libero_object", 0), ("libero_90", 89)])
def test_initial_states_are_what_torch_reads(suite, task_id, libero_assets):
    file = problem_file(suite, task_id)
    saved = file.parents[2] / "init_files" / suite / f"{file.stem}.pruned_init"
    theirs = torch.load(saved, weights_only=False)
    ours = initial_states(suite, task_id)
    assert ours.dtype == np.float64 and len(ours) == 50
    np.testing.assert_array_equal(ours, theirs)


def test_training_and_evaluation_share_no_initial_state():
    spec = libero_spec("libero_goal", None)
    assert spec.train_states == tuple(range(30)) and spec.eval_states == tuple(range(30, 50))
    assert spec.benchmark_states == tuple(range(50))
    assert (spec.action_dim, spec.proprio_dim) == (7, 8)


def test_a_time_limit_can_be_set():
    assert {task.max_steps for task in libero_spec("libero_object", 64).tasks} == {64}


def test_an_initial_state_file_runs_no_code():
    class Evil:
        def __reduce__(self):
            return os.getpid, ()

    with pytest.raises(pickle.UnpicklingError, match=r"no posix\.getpid"):
        libero_suites._ArrayUnpickler(io.BytesIO(pickle.dumps(Evil()))).load()


def test_an_unknown_suite_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="no suite 'libero_100'; choose one of libero_spatial, .*libero_90"):
        libero_spec("libero_100", None)


def test_a_missing_package_is_reported_with_the_command(monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    libero_suites.package_folder.cache_clear()
    libero_suites.task_names.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"hf-libero is not installed; in your clone .*pip install .*libero"):
            libero_spec("libero_spatial", None)
    finally:
        libero_suites.package_folder.cache_clear()


def test_the_factory_leaves_simulator_and_torch_alone(libero_assets):
    code = (
        "import pickle, sys\n"
        "from vlarl.config.schema import EnvConfig\n"
        "from vlarl.envs.libero import libero_factory\n"
        "pickle.dumps(libero_factory(EnvConfig(suite='libero_90'), 224, 'sparse'))\n"
        "print(sorted({'torch', 'mujoco', 'libero', 'robosuite'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_there_is_no_dense_reward(libero_assets):
    with pytest.raises(UsageError, match="libero_goal rewards success only"):
        libero_factory(EnvConfig(suite="libero_goal"), 224, "dense")


@pytest.mark.parametrize(
    ("render", "set_before", "backend"),
    [("auto", None, "egl"), ("auto", "osmesa", "osmesa"), ("osmesa", "egl", "osmesa"), ("egl", "osmesa", "egl")],
)
def test_the_render_backend(render, set_before, backend, libero_assets, monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    if set_before:
        monkeypatch.setenv("MUJOCO_GL", set_before)
    variables = libero_factory(EnvConfig(suite="libero_goal", render=render), 224, "sparse").variables(3)
    assert variables["MUJOCO_GL"] == variables["PYOPENGL_PLATFORM"] == backend
    assert variables["LP_NUM_THREADS"] == variables["OMP_NUM_THREADS"] == "1"
    assert "MUJOCO_EGL_DEVICE_ID" not in variables


def test_the_gpu_that_renders(libero_assets):
    variables = libero_factory(EnvConfig(suite="libero_goal", render_gpu=2), 224, "sparse").variables(0)
    assert variables["MUJOCO_EGL_DEVICE_ID"] == "2"


@pytest.mark.parametrize(
    ("version", "said"),
    [("3.2.7", "not tested"), ("3.3.3", "darker"), ("3.3.10", "darker"), ("3.4.0", "task 5"), ("3.8", "task 5")],
)
def test_other_versions_of_mujoco_are_warned_of(version, said):
    problem = mujoco_problem(version)
    assert problem is not None and said in problem and "pip install 'mujoco>=3.3.0,<=3.3.2'" in problem


def test_known_good_versions_of_mujoco():
    assert [mujoco_problem(version) for version in KNOWN_GOOD_MUJOCO] == [None] * 3
