"""Images of MuJoCo scenes, rendered off screen on demand."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any

import numpy as np

from vlarl.errors import UsageError
from vlarl.types import UInt8Array

_MAX_GEOMS = 1000  # of a scene, as in robosuite
_COLLISION_SHAPES, _VISIBLE_SHAPES = 0, 1  # robosuite's groups of geoms


class Renderer:
    """Renders one model at a time, all in one OpenGL context: a process can't have many, nor free them safely."""

    def __init__(self, largest: int, exact: bool) -> None:
        import mujoco

        self._largest = largest
        self._exact = exact
        try:
            self._gl = mujoco.GLContext(largest, largest)
            self._gl.make_current()
        except (ImportError, RuntimeError) as error:
            backend = os.environ.get("MUJOCO_GL")
            remedy = "vlarl doctor lists the backends that work here; choose one with env.render."
            raise UsageError(f"MuJoCo can't render with {backend}: {error}. {remedy}") from error
        self._attached: weakref.ref[Any] | None = None
        self._context: Any = None
        atexit.register(self.close)  # the driver shuts down at exit and must not be called after that

    def render(self, model: Any, data: Any, camera: str, size: int) -> UInt8Array:
        """[size, size, 3] what a camera of the model sees, with the bottom row first, as in OpenGL."""
        import mujoco

        self._gl.make_current()  # another renderer may have been used meanwhile
        if self._attached is None or self._attached() is not model:
            self._attach(model)
        view = mujoco.MjvCamera()
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self._options, mujoco.MjvPerturb(), view, everything, self._scene)
        viewport = mujoco.MjrRect(0, 0, size, size)
        mujoco.mjr_render(viewport, self._scene, self._context)
        pixels = np.empty((size, size, 3), dtype=np.uint8)
        mujoco.mjr_readPixels(pixels, None, viewport, self._context)
        return pixels

    def _attach(self, model: Any) -> None:
        """Render this model from now on: its meshes and textures replace those of the last one."""
        import mujoco

        self._detach()
        model.vis.global_.offwidth = model.vis.global_.offheight = self._largest
        if not self._exact:
            model.vis.quality.offsamples = 0
        self._scene = mujoco.MjvScene(model, maxgeom=_MAX_GEOMS)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = int(self._exact)
        self._options = mujoco.MjvOption()
        self._options.geomgroup[_COLLISION_SHAPES] = 0
        self._options.geomgroup[_VISIBLE_SHAPES] = 1
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._attached = weakref.ref(model)  # a strong reference would keep two models in memory while the next is read

    def _detach(self) -> None:
        if self._context is not None:
            self._context.free()
        self._context = self._scene = self._attached = None

    def close(self) -> None:
        """Release everything; nothing can be rendered any more."""
        atexit.unregister(self.close)
        if self._gl is not None:
            self._gl.make_current()
            self._detach()
            self._gl.free()
            self._gl = None
