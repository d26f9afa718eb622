"""The rules of the suite itself: time limits, examples, what is left out and what must not be (tests/fakes/suite.py)."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import suite
from hypothesis import settings
from hypothesis.configuration import storage_directory

import vlarl

ROOT = Path(__file__).resolve().parents[2]
HOOKS = "from fakes.suite import pytest_collection_modifyitems, pytest_terminal_summary\n"
WITHOUT_ASSETS = """
import fakes.libero_assets
from fakes.libero_assets import libero_assets
from vlarl.errors import UsageError

def absent(configured):
    raise UsageError("not here")

fakes.libero_assets.find_assets = absent
"""


def run_inner(folder: Path, tests: str, *options: str, conftest: str = "", **variables: str) -> str:
    """What pytest prints for these tests, run with our settings and hooks in a process of its own."""
    (folder / "conftest.py").write_text(HOOKS + conftest)
    (folder / "test_inner.py").write_text(tests)
    search = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    outside = {name: value for name, value in os.environ.items() if name not in ("CI", "VLARL_GOLDEN")}
    outside = {name: value for name, value in outside.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    done = subprocess.run(
        [*command, "test_inner.py", *options],
        cwd=folder,
        env=outside | {"PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


def test_every_test_has_a_time_limit(request):
    assert request.config.pluginmanager.has_plugin("timeout")
    limit = float(request.config.getini("timeout"))
    assert 300 <= limit < float(request.config.getini("faulthandler_timeout"))
    assert request.config.getini("timeout_method") == "signal"


@pytest.mark.slow
def test_a_test_that_hangs_fails_cleans_up_and_says_where(tmp_path):
    hangs = """
import time
from pathlib import Path

def test_hangs():
    try:
        time.sleep(3600)
    finally:
        Path("cleaned").touch()

def test_after():
    pass
"""
    text = run_inner(tmp_path, hangs, "--timeout", "1")
    assert "time.sleep(3600)" in text and "Timeout" in text and "1 failed, 1 passed" in text
    assert (tmp_path / "cleaned").exists()


def test_examples_know_no_clock_no_chance_and_no_file():
    assert settings().deadline is None and settings().derandomize and settings().database is None
    assert not Path(str(storage_directory().path)).resolve().is_relative_to(ROOT)
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    assert [str(path) for path in files if "deadline=" in path.read_text() and "@given" in path.read_text()] == []


LEFT_OUT = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_skipped(number):
    pytest.skip("there is no robot")

@pytest.mark.skipif(True, reason="there is no GPU")
def test_without_gpu():
    pass

def test_run():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_what_was_not_tested_is_said_in_one_line(tmp_path, options):
    text = run_inner(tmp_path, LEFT_OUT, *options)
    lines = [line for line in text.splitlines() if line.startswith("not tested")]
    assert lines == ["not tested: 3 × there is no robot | 1 × there is no GPU"]


@pytest.mark.slow
def test_a_run_that_leaves_nothing_out_says_so(tmp_path):
    assert "not tested: nothing was left out of what was chosen\n" in run_inner(tmp_path, "def test_run():\n    pass\n")


@pytest.mark.slow
def test_what_a_keyword_leaves_out_is_not_called_nothing(tmp_path):
    text = run_inner(tmp_path, LEFT_OUT, "-k", "run")
    assert "not tested: what -k 'run' leaves out, which make test runs\n" in text


@pytest.mark.slow
def test_missing_assets_are_a_skip_with_the_command_that_gets_them_and_a_failure_in_ci(tmp_path):
    uses = "def test_it(libero_assets):\n    pass\n"
    text = run_inner(tmp_path, uses, conftest=WITHOUT_ASSETS)
    (line,) = [line for line in text.splitlines() if line.startswith("not tested")]
    assert line.startswith(
        "not tested: 1 × LIBERO's assets are not on this machine. Get them with: hf download lerobot/"
    )
    assert "1 skipped" in text
    text = run_inner(tmp_path, uses, conftest=WITHOUT_ASSETS, CI="true")
    assert "with CI=true that is a failure. Get them with: hf download lerobot/" in text
    assert "1 error" in text and "skipped" not in text


@pytest.mark.slow
def test_markers_and_golden_arrays_of_another_folder_are_named(tmp_path):
    (tmp_path / "rl_math").mkdir()
    text = run_inner(tmp_path, "def test_run():\n    pass\n", "-m", "not slow", VLARL_GOLDEN=str(tmp_path))
    assert "not tested: what -m 'not slow' leaves out, which make test runs\n" in text
    rest = "openvla-tiny, openvla-oft-tiny, smolvla-tiny, rlds, film, towers, lerobot"
    assert f"golden arrays from {tmp_path}; from tests/golden: {rest}\n" in text


@pytest.mark.parametrize(
    ("path", "fixtures", "slow"),
    [
        ("e2e/test_training.py", (), True),
        ("vllm/test_vllm_sync.py", (), True),
        ("unit/envs/test_libero_env.py", ("libero_assets",), True),
        ("unit/envs/test_tabletop_pool.py", ("tmp_path",), False),
        ("unit/envs/test_metaworld_env.py", (), True),
        ("golden/test_rl_math.py", (), False),
    ],
)
def test_what_starts_processes_and_simulators_is_slow(path, fixtures, slow):
    markers = []
    item = SimpleNamespace(path=ROOT / "tests" / path, name="test_x", fixturenames=fixtures, add_marker=markers.append)
    suite.pytest_collection_modifyitems([item])
    assert [marker.name for marker in markers] == ["slow"] * slow


def test_long_files_run_first_and_those_that_share_a_cluster_in_a_row():
    """Short files at the end keep all cores busy; the tests of a file stay together, in their order."""
    given = ["contract/test_a.py one", "distributed/test_a.py ray_here", "distributed/test_b.py"]
    given += ["distributed/test_b.py two", "distributed/test_c.py ray_here", "unit/test_a.py", "vllm/test_a.py"]
    given += ["distributed/test_c.py last"]
    items = [
        SimpleNamespace(path=ROOT / "tests" / each.split()[0], name=each, fixturenames=each.split()[1:], add_marker=str)
        for each in given
    ]
    suite.pytest_collection_modifyitems(items)
    assert [item.name for item in items] == [given[i] for i in (2, 3, 1, 4, 7, 6, 0, 5)]


def test_processes_that_tests_start_look_for_garbage_rarely_and_find_the_tested_package():
    program = "import gc, vlarl; print(gc.get_threshold()[0], vlarl.__file__)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["100000", vlarl.__file__] and gc.isenabled() and gc.get_freeze_count() > 100_000


@pytest.mark.parametrize("entry", suite.SLOW_TESTS)
def test_slow_tests_are_there(entry):
    path, _, name = entry.partition("::")
    assert f"def {name or 'test_'}" in (ROOT / "tests" / path).read_text(encoding="utf-8")


def test_nothing_that_dev_installs_may_be_missing():
    """A skip for want of a package would hide that `dev` no longer brings it."""
    word = "import" + "orskip"
    assert [str(path) for path in (ROOT / "tests").rglob("*.py") if word in path.read_text(encoding="utf-8")] == []


def test_no_two_files_of_tests_have_one_name():
    """Pytest imports them by their names alone: of two that one process collects, the second is an error."""
    names = [path.name for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    assert sorted(names) == sorted(set(names))
