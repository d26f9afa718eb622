"""The examples run as they are printed, in an empty folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vlarl

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SOURCE = str(Path(vlarl.__file__).parents[1])

SAYS = {
    "train_from_python.py": ["iteration 2: success ", "x failure: pick up the black bowl", "report.html"],
    "own_environment.py": ["success on 2 episodes: ", "report.html"],
    "compare_checkpoints.py": ["task 3: A ", " (10 compared)"],
}


def test_every_example_is_run_and_listed():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(SAYS)
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({name})" in listed for name in [*scripts, "first_run.ipynb"])


def run(program: Path, folder: Path) -> str:
    paths = os.pathsep.join([SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_scripts(name, tmp_path):
    printed = run(EXAMPLES / name, tmp_path)
    for words in SAYS[name]:
        assert words in printed
    assert {path.name for path in tmp_path.iterdir()} <= {"runs"}, "nothing else is left behind"


def test_the_notebook_holds_no_results_of_a_machine():
    notebook = json.loads((EXAMPLES / "first_run.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert notebook["nbformat"] == 4 and cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs_from_the_first_cell_to_the_last(tmp_path):
    notebook = json.loads((EXAMPLES / "first_run.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join([*cells, "assert action.shape == (4, 7) and len(rows) == 3"]), encoding="utf-8")
    folder = tmp_path / "work"
    folder.mkdir()
    printed = run(script, folder)
    assert "2 {'rollout/mean_return': " in printed and "pick up the black bowl" in printed
    assert (folder / "runs" / "notebook" / "report.html").is_file()
