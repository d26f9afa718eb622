"""Finding LIBERO's assets, and importing its package without prompts, log output and leftover files."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlarl.config.schema import EnvConfig
from vlarl.envs.libero import libero_factory
from vlarl.envs.libero.assets import ASSETS_REPOSITORY, find_assets
from vlarl.envs.libero.env import LiberoEnv
from vlarl.envs.libero.suites import libero_spec, package_folder
from vlarl.errors import UsageError
from vlarl.types import Task

PARTS = (
    "articulated_objects",
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "textures",
    "turbosquid_objects",
)


def make_assets(folder: Path, parts: tuple[str, ...] = PARTS) -> Path:
    for part in parts:
        (folder / part).mkdir(parents=True)
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder without assets; the package brings none."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LIBERO_ASSETS", raising=False)
    if (package_folder() / "assets").exists():
        pytest.skip("this installation of LIBERO has its assets inside")
    return tmp_path / "home"


def test_the_option_comes_before_the_variable_and_that_before_the_cache(home, tmp_path, monkeypatch):
    cached = make_assets(home / ".cache" / "libero" / "assets")
    assert find_assets(None) == cached
    named = make_assets(tmp_path / "named")
    monkeypatch.setenv("LIBERO_ASSETS", str(named))
    assert find_assets(None) == named
    configured = make_assets(tmp_path / "configured")
    assert find_assets(str(configured)) == configured


def test_without_assets_the_message_says_where_it_looked_and_how_to_get_them(home):
    with pytest.raises(UsageError) as refusal:
        find_assets(None)
    cache = home / ".cache" / "libero" / "assets"
    assert f"{cache} is not a folder" in str(refusal.value)
    command = f"hf download {ASSETS_REPOSITORY} --repo-type dataset --local-dir {cache}"
    assert str(refusal.value).splitlines()[-1].strip() == command, "on a line of its own"
    assert "env.assets" in str(refusal.value) and "LIBERO_ASSETS" in str(refusal.value)


def test_the_repository_is_the_one_that_libero_downloads_from():
    source = (package_folder() / "utils" / "download_utils.py").read_text(encoding="utf-8")
    assert f'HF_ASSETS_REPO_ID = "{ASSETS_REPOSITORY}"' in source


def test_a_named_folder_that_lacks_something_is_not_passed_over(home, tmp_path, monkeypatch):
    make_assets(home / ".cache" / "libero" / "assets")
    broken = make_assets(tmp_path / "broken", PARTS[:4])
    with pytest.raises(UsageError, match=rf"env\.assets: {broken} lacks textures, turbosquid_objects\. Get them with"):
        find_assets(str(broken))
    monkeypatch.setenv("LIBERO_ASSETS", str(broken))
    with pytest.raises(UsageError, match=r"LIBERO_ASSETS: .* lacks textures"):
        find_assets(None)


def test_missing_assets_are_refused_before_any_process_starts(home):
    with pytest.raises(UsageError, match="are not on this machine"):
        libero_factory(EnvConfig(suite="libero_spatial"), 64, "sparse")


def test_a_missing_mesh_is_named(libero_assets, tmp_path):
    incomplete = tmp_path / "assets"
    incomplete.mkdir()
    for entry in libero_assets.iterdir():
        (incomplete / entry.name).symlink_to(entry)
    (incomplete / "stable_scanned_objects").unlink()
    (incomplete / "stable_scanned_objects").mkdir()
    env = LiberoEnv(libero_spec("libero_spatial", None), incomplete, ("agent",), 32, exact_pixels=False)
    try:
        with pytest.raises(UsageError, match=r"there is no .*stable_scanned_objects.*, which task 0 needs\. Get them"):
            env.reset(Task("libero_spatial", 0, 0, 0))
    finally:
        env.close()


EPISODE = """
import hashlib, os, sys
from pathlib import Path
from vlarl.config.schema import EnvConfig
from vlarl.envs.libero import libero_factory
from vlarl.types import Task
factory = libero_factory(EnvConfig(suite="libero_spatial"), 48, "sparse")
os.environ.update(factory.variables(0))
env = factory.build()
env.reset(Task("libero_spatial", 2, 8, 5))
seen = env.observe()
Path(sys.argv[1]).write_text(hashlib.sha256(seen.images.tobytes() + seen.proprio.tobytes()).hexdigest())
"""


def test_a_separate_process_prompts_for_nothing_prints_nothing_and_leaves_nothing(libero_assets, tmp_path):
    for folder in ("home", "work"):
        (tmp_path / folder).mkdir()
    # A GPU for rendering that CUDA_VISIBLE_DEVICES does not name is refused by robosuite's import, but for prepare().
    environment = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "CUDA_VISIBLE_DEVICES": "7",
        "MUJOCO_EGL_DEVICE_ID": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", EPISODE, str(tmp_path / "digest")],
        env=environment,
        cwd=tmp_path / "work",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []
    assert list((tmp_path / "work").iterdir()) == []
    assert not list(Path(os.environ["TMPDIR"]).glob("vlarl-libero-[!m]*")), "its private configuration is gone"

    env = LiberoEnv(libero_spec("libero_spatial", None), libero_assets, ("agent",), 48, exact_pixels=False)
    env.reset(Task("libero_spatial", 2, 8, 6))
    seen = env.observe()
    env.close()
    digest = hashlib.sha256(seen.images.tobytes() + seen.proprio.tobytes()).hexdigest()
    assert digest == (tmp_path / "digest").read_text(), "an episode begins alike in any process, whatever its seed"
