"""LIBERO's suites, read from the installed package without importing it: the parent process stays light."""

from __future__ import annotations

import codecs
import importlib.util
import pickle
import re
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.config.known import SUITES
from vlarl.envs.base import SuiteSpec, TaskSpec
from vlarl.errors import MissingExtraError, UsageError

NUM_STATES = 50  # initial states that LIBERO ships for each task
NUM_TRAIN_STATES = 30
_SCENE = re.compile(r"^[A-Z][A-Z_]*SCENE\d+_")  # names of libero_10 and libero_90 begin with the scene


def libero_spec(suite: str, max_steps: int | None) -> SuiteSpec:
    """The suite's tasks in the benchmark's order; `max_steps` replaces its time limit."""
    names = task_names(suite)
    limit = max_steps or SUITES[suite].max_steps
    assert limit is not None
    tasks = tuple(TaskSpec(task_id, instruction_of(name), limit) for task_id, name in enumerate(names))
    states = tuple(range(NUM_STATES))
    return SuiteSpec(suite, tasks, states[:NUM_TRAIN_STATES], states[NUM_TRAIN_STATES:], states)


def instruction_of(name: str) -> str:
    """The instruction, which LIBERO writes into the name of the task."""
    return _SCENE.sub("", name).replace("_", " ")


@cache
def task_names(suite: str) -> tuple[str, ...]:
    """Names of the suite's tasks, which are also the names of their files."""
    file = package_folder() / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("_libero_suite_task_map", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suites: dict[str, list[str]] = module.libero_task_map
    if suite not in suites or suite not in SUITES:
        known = ", ".join(name for name in suites if name in SUITES)
        raise UsageError(f"env.suite: LIBERO has no suite {suite!r}; choose one of {known}.")
    return tuple(suites[suite])


@cache
def package_folder() -> Path:
    """Folder of the installed package `libero.libero`, which is not imported."""
    spec = importlib.util.find_spec("libero")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(location) / "libero"
        if (folder / "benchmark" / "libero_suite_task_map.py").is_file():
            return folder
    raise MissingExtraError("hf-libero", "libero")


def problem_file(suite: str, task_id: int) -> Path:
    """The file that describes a task's scene and goal."""
    return package_folder() / "bddl_files" / suite / f"{task_names(suite)[task_id]}.bddl"


def initial_states(suite: str, task_id: int) -> NDArray[np.float64]:
    """[50, S] LIBERO's initial states of a task: time, positions and velocities of everything."""
    file = package_folder() / "init_files" / suite / f"{task_names(suite)[task_id]}.pruned_init"
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        with archive.open(name) as stream:
            states: NDArray[np.float64] = _ArrayUnpickler(stream).load()
    return states


class _ArrayUnpickler(pickle.Unpickler):
    """Reads an array that torch saved: torch would cost each process 180 MB, and its loader runs any code inside."""

    _ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        """What an array needs, and nothing else."""
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"an array needs no {module}.{name}: this file is not LIBERO's") from None
