"""Compiled scenes, cached in a folder of the user below the temporary directory.

Compiling a LIBERO scene takes a second and leaves hundreds of megabytes in the process; reading it back takes a tenth
of that and leaves nothing. So a separate process compiles each scene once, and the simulators of all runs read it.
Files are written under another name and renamed: readers see a complete model or none.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from vlarl.envs.mujoco import opengl_variables

CHANGING_PARTS = ("body_pos", "body_quat", "site_rgba")  # where furniture stands, what glows
MOST_BYTES = 8 * 2**30  # of all files together; the least recently used are deleted
_COMPILER = """
import sys, mujoco
mujoco.mj_saveModel(mujoco.MjModel.from_xml_string(sys.stdin.read()), sys.argv[1], None)
"""
_FILE = re.compile(r'file="([^"]+)"')


@dataclass(frozen=True)
class Scene:
    """A compiled MuJoCo model, and the original values of the parts that LIBERO writes to."""

    model: Any
    original: Mapping[str, NDArray[Any]]


class SceneReader:
    """Scenes for one environment, which keeps the last: all tasks of libero_spatial share one, as do libero_goal's."""

    def __init__(self) -> None:
        self._name = ""
        self._scene: Scene | None = None

    def read(self, xml: str) -> Scene:
        """The scene of this XML; the same object as before if it is the same scene."""
        name = _fingerprint(xml)
        if self._scene is None or self._name != name:
            self._scene = None  # never hold two models in memory
            model = _load(xml, name)
            self._scene = Scene(model, {part: getattr(model, part).copy() for part in CHANGING_PARTS})
            self._name = name
        return self._scene


def _load(xml: str, name: str) -> Any:
    """The compiled model, from the cache folder if possible."""
    import mujoco

    folder = models_folder()
    if folder is not None:
        file = folder / f"{name}.mjb"
        if not file.is_file():
            _compile(xml, file)
        try:
            os.utime(file)
            return mujoco.MjModel.from_binary_path(str(file))
        except (OSError, ValueError):  # not written, deleted by another process, or damaged
            file.unlink(missing_ok=True)
    return mujoco.MjModel.from_xml_string(xml)


def models_folder() -> Path | None:
    """The folder, which only this user can write to; None if there can't be one."""
    folder = Path(tempfile.gettempdir()) / f"vlarl-libero-models-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    return folder if folder.is_dir() and status.st_uid == os.getuid() and not status.st_mode & 0o022 else None


def _fingerprint(xml: str) -> str:
    """A hash of all inputs of a model; FileNotFoundError names a missing mesh or texture."""
    from mujoco import __version__

    parts = [__version__, xml]
    for file in sorted(set(_FILE.findall(xml))):
        status = os.stat(file)
        parts.append(f"{file} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _compile(xml: str, target: Path) -> None:
    """Compile in another process and cache the result if it fits. After a failure the caller compiles itself."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    os.close(descriptor)
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", _COMPILER, name],  # -P: nothing from the working directory
            input=xml.encode(),
            env={**os.environ, **opengl_variables("disabled")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        if _free_space(target.parent, os.stat(name).st_size):
            os.replace(name, target)
    except (OSError, subprocess.CalledProcessError):
        return
    finally:
        Path(name).unlink(missing_ok=True)


def _free_space(folder: Path, num_bytes: int) -> bool:
    """Delete old models until another one fits; False if the disk is too full to keep any."""
    used = {file: file.stat() for file in folder.glob("*.mjb")}
    total = sum(status.st_size for status in used.values())
    limit = min(MOST_BYTES, total + shutil.disk_usage(folder).free // 4)
    for file in sorted(used, key=lambda file: used[file].st_mtime):
        if total + num_bytes <= limit:
            break
        file.unlink(missing_ok=True)
        total -= used[file].st_size
    return total + num_bytes <= limit
