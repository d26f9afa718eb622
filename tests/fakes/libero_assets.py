"""LIBERO's assets for tests. Simulators render off screen; MuJoCo reads how when it is imported, so it is said here."""

import importlib.util
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.suite import missing

from vlarl.envs.libero.assets import download_command, find_assets
from vlarl.errors import UsageError

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
os.environ.setdefault("LP_NUM_THREADS", "1")

CACHE = Path.home() / ".cache" / "libero" / "assets"  # where vlarl looks when nothing else is named
ARCHIVE = Path(__file__).parents[3] / "shared" / "libero" / "libero_assets.tar.xz"


@pytest.fixture(scope="session")
def libero_assets() -> Iterator[Path]:
    """LIBERO's assets, which LIBERO_ASSETS names too; compiled scenes go to a folder that is removed in the end."""
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(tempfile.mkdtemp(prefix="libero-"))
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)  # what it remembers of TMPDIR
        try:
            if ARCHIVE.is_file():
                with tarfile.open(ARCHIVE) as archive:
                    archive.extractall(folder / "assets", filter="data")
                patch.setenv("LIBERO_ASSETS", str(folder / "assets"))
            assert importlib.util.find_spec("libero"), "LIBERO, which `dev` installs, is not here: pip install '.[dev]'"
            try:
                assets = find_assets(None)
            except UsageError:
                missing("LIBERO's assets are not on this machine", f"Get them with: {download_command(CACHE)}")
            patch.setenv("LIBERO_ASSETS", str(assets))
            yield assets
        finally:
            shutil.rmtree(folder)
