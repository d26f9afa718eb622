"""Finds LIBERO's meshes and textures, and imports its package without prompts, downloads and log output."""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from vlarl.envs.libero.suites import package_folder
from vlarl.errors import MissingExtraError, UsageError

ASSETS_REPOSITORY = "lerobot/libero-assets"  # where hf-libero downloads them from
_PARTS = (
    "articulated_objects",
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "textures",
    "turbosquid_objects",
)
_log = logging.getLogger(__name__)


def find_assets(configured: str | None) -> Path:
    """The folder of LIBERO's assets: env.assets, LIBERO_ASSETS, the package's own, or LIBERO's cache."""
    for source, named in (("env.assets", configured), ("LIBERO_ASSETS", os.environ.get("LIBERO_ASSETS"))):
        if named:
            folder = Path(named).expanduser().resolve()
            if missing := _missing(folder):
                raise UsageError(f"{source}: {folder} {missing}. {how_to_get(folder)}")
            return folder
    cache = Path.home() / ".cache" / "libero" / "assets"
    candidates = (package_folder() / "assets", cache)
    for folder in candidates:
        if not _missing(folder):
            return folder
    looked = "; ".join(f"{folder} {_missing(folder)}" for folder in candidates)
    raise UsageError(
        "LIBERO's meshes and textures are not on this machine: neither env.assets nor LIBERO_ASSETS is set, "
        f"and {looked}. Say where they are with env.assets, or download them. {how_to_get(cache)}"
    )


def _missing(folder: Path) -> str | None:
    if not folder.is_dir():
        return "is not a folder"
    absent = [part for part in _PARTS if not (folder / part).is_dir()]
    return f"lacks {', '.join(absent)}" if absent else None


def how_to_get(folder: Path) -> str:
    """The command that puts LIBERO's assets into a folder, on a line of its own, so that it can be copied."""
    return f"Get them with:\n  {download_command(folder)}"


def download_command(folder: Path) -> str:
    """The command, quoted for a shell."""
    return f"hf download {ASSETS_REPOSITORY} --repo-type dataset --local-dir {shlex.quote(str(folder))}"


def prepare(assets: Path) -> None:
    """Import LIBERO in this process, with these assets; call this before using any of it.

    By default, its first import prompts on the terminal and writes to the home folder.
    """
    with _private_configuration(assets), _any_render_gpu():
        _import_robosuite_quietly()
        import libero.libero

        libero.libero._assets_path_cache = str(assets)
        import libero.libero.envs
    import mujoco

    mujoco.set_mju_user_warning(_log.warning)  # by default they go to MUJOCO_LOG.TXT in the working directory


@contextmanager
def _private_configuration(assets: Path) -> Iterator[None]:
    """A temporary LIBERO configuration for the import; each process has one of its own."""
    package = package_folder()
    with tempfile.TemporaryDirectory(prefix="vlarl-libero-") as folder:
        paths = {
            "assets": str(assets),
            "bddl_files": str(package / "bddl_files"),
            "benchmark_root": str(package),
            "datasets": str(Path(folder) / "datasets"),
            "init_states": str(package / "init_files"),
        }
        Path(folder, "config.yaml").write_text(yaml.safe_dump(paths), encoding="utf-8")
        with _variable("LIBERO_CONFIG_PATH", folder):
            yield


@contextmanager
def _any_render_gpu() -> Iterator[None]:
    """robosuite refuses to render on a GPU that CUDA_VISIBLE_DEVICES hides; EGL counts GPUs independently."""
    with _variable("CUDA_VISIBLE_DEVICES", None):
        yield


@contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _import_robosuite_quietly() -> None:
    """Without its advice on stderr and its log file /tmp/robosuite.log, which only its first user can open."""
    if "robosuite" in sys.modules:
        return
    package = importlib.util.find_spec("robosuite")
    if package is None or package.submodule_search_locations is None:
        raise MissingExtraError("robosuite", "libero")
    spec = importlib.util.spec_from_file_location(
        "robosuite.macros", Path(package.submodule_search_locations[0]) / "macros.py"
    )
    assert spec is not None and spec.loader is not None
    macros = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    vars(macros).update(CONSOLE_LOGGING_LEVEL=None, FILE_LOGGING_LEVEL=None)  # read while robosuite is imported
    sys.modules["robosuite.macros"] = macros
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    import robosuite

    robosuite.macros = macros
