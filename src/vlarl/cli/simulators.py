"""Checks of the simulators on this machine: packages, rendering backends, assets. Part of `vlarl doctor`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from vlarl.cli.installation import Check
from vlarl.envs.libero.assets import find_assets
from vlarl.envs.libero.versions import mujoco_problem
from vlarl.envs.mujoco import opengl_variables
from vlarl.errors import UsageError, install_command

BACKENDS = {
    "egl": "apt-get install libegl1 libgl1-mesa-dri, or a GPU driver with EGL",
    "osmesa": "apt-get install libosmesa6",
}
PROBE_S = 60

# Renders a red wall, to detect a backend that opens but renders nothing. Each backend needs its own process: MuJoCo and
# PyOpenGL choose theirs when they are imported.
PROBE = """
import os
import mujoco
from OpenGL import GL
wall = "<mujoco><worldbody><light pos='0 0 3'/><geom type='plane' size='9 9 1' rgba='1 0 0 1'/></worldbody></mujoco>"
model = mujoco.MjModel.from_xml_string(wall)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 32, 32)
name = GL.glGetString(GL.GL_RENDERER).decode()
renderer.update_scene(data)
red, green, _ = renderer.render()[24:].mean((0, 1))
print(name if red > 2 * green + 5 else "BLANK", flush=True)
os._exit(0)  # skips closing the context, which is noisy
"""


def check_simulators() -> list[Check]:
    """MuJoCo, each rendering backend, and LIBERO's assets; a line for each, installed or not."""
    found = _version("mujoco")
    if found is None:
        return [Check("missing", "mujoco", f"no LIBERO, no Meta-World: run {install_command('libero,metaworld')}")]
    problem = mujoco_problem(found)
    mujoco = Check("warning", "mujoco", f"{found}: {problem}") if problem else Check("ok", "mujoco", found)
    return [mujoco, *(_backend(name, remedy) for name, remedy in BACKENDS.items()), _libero_assets()]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backend(name: str, remedy: str) -> Check:
    """Whether MuJoCo renders an image with this backend, and by which driver."""
    environment = {**os.environ, **opengl_variables(name, pyopengl=True)}
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("missing", f"gl {name}", f"did not render within {PROBE_S} s; to use it: {remedy}")
    driver = probe.stdout.strip()
    if probe.returncode == 0 and driver != "BLANK":
        return Check("ok", f"gl {name}", f"renders with {driver}")
    reason = "renders a blank image" if driver == "BLANK" else _last_line(probe.stderr)
    return Check("missing", f"gl {name}", f"{reason}; to use it: {remedy}")


def _last_line(text: str) -> str:
    """The error line of a traceback."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith(" ")]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or ["fails without a message"])[0]


def _libero_assets() -> Check:
    if _version("hf-libero") is None:
        return Check("missing", "libero", f"run {install_command('libero')}")
    try:
        return Check("ok", "libero", f"assets in {find_assets(None)}")
    except UsageError as error:
        return Check("missing", "libero", " ".join(str(error).split()))
