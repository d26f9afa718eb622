"""Settings of MuJoCo that all simulators share: how it renders, and where its warnings go."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger(__name__)


def render_backend(render: str) -> str:
    """The value of MUJOCO_GL for an `env.render`: auto is egl, or what MUJOCO_GL is already."""
    return os.environ.get("MUJOCO_GL", "egl") if render == "auto" else render


def opengl_variables(backend: str, gpu: int | None = None, *, pyopengl: bool = False) -> dict[str, str]:
    """Environment variables of a process: how MuJoCo, and PyOpenGL where it is used, renders; `disabled`: it can't."""
    variables = {"MUJOCO_GL": backend}
    if pyopengl:
        variables["PYOPENGL_PLATFORM"] = backend
    if gpu is not None:
        variables["MUJOCO_EGL_DEVICE_ID"] = str(gpu)
    return variables


def render_variables(backend: str, gpu: int | None, pyopengl: bool) -> dict[str, str]:
    """Environment variables of a simulator's process: how it renders, and one thread per process.

    There are as many processes as cores, so more threads would compete.
    """
    return opengl_variables(backend, gpu, pyopengl=pyopengl) | {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}


def log_warnings() -> None:
    """Send MuJoCo's warnings to the log if MuJoCo is loaded; call this before a simulator runs.

    By default MuJoCo writes them to MUJOCO_LOG.TXT in the working directory.
    """
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and hasattr(mujoco, "set_mju_user_warning"):
        mujoco.set_mju_user_warning(_warn)


def _warn(message: str) -> None:
    log.warning("MuJoCo: %s", message)
