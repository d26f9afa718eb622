"""Images of MuJoCo models, rendered offscreen with one OpenGL context per process.

    Canvas                   the process's OpenGL context
      └─ ModelRenderer       what one model has uploaded to it: meshes, textures, a framebuffer
           └─ render(view)   one image

Nothing is rendered, and no context made, before the first image is requested.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.envs.metaworld.views import FixedView, View
from vlarl.types import UInt8Array

MAX_GEOMS = 1000  # Meta-World's largest scene has a fifth of it
HIDDEN_GROUP = 5  # of geoms that MuJoCo does not render


class Canvas:
    """An OpenGL context, for images of at most `size` pixels square."""

    def __init__(self, size: int, exact: bool) -> None:
        self.size = size
        self.exact = exact  # multisampling, shadows and reflections, as the model specifies
        self._context: Any = None

    def use(self) -> None:
        """Make the context current; create it at first use."""
        import mujoco

        if self._context is None:
            self._context = mujoco.GLContext(self.size, self.size)
        self._context.make_current()

    def close(self) -> None:
        """Release the context; its renderers must be closed before."""
        if self._context is not None:
            self._context.free()
            self._context = None


class ModelRenderer:
    """Renders one model on a canvas."""

    def __init__(self, canvas: Canvas, model: Any) -> None:
        import mujoco

        self._canvas = canvas
        self._model = model
        model.vis.global_.offwidth = model.vis.global_.offheight = canvas.size
        if not canvas.exact:
            model.vis.quality.offsamples = 0
            model.vis.quality.shadowsize = 0
        canvas.use()
        self._resources = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        self._scene = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = canvas.exact
        self._options = mujoco.MjvOption()
        self._groups = model.geom_group.copy()

    def render(self, data: Any, view: View, size: int) -> UInt8Array:
        """An image [size, size, 3], upright, of the model in the given state."""
        import mujoco

        self._canvas.use()
        camera, upside_down = self._camera(view)
        self._compose(data, camera)
        if not self._canvas.exact:
            self._model.geom_group[self._out_of_view(data)] = HIDDEN_GROUP
            self._compose(data, camera)
            self._model.geom_group[:] = self._groups
        viewport = mujoco.MjrRect(0, 0, size, size)
        image = np.empty((size, size, 3), np.uint8)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._resources)
        mujoco.mjr_render(viewport, self._scene, self._resources)
        mujoco.mjr_readPixels(image, None, viewport, self._resources)
        # OpenGL's first row is the lowest; a camera that hangs upside down has its columns swapped instead.
        return np.ascontiguousarray(image[:, ::-1] if upside_down else image[::-1])

    def _compose(self, data: Any, camera: Any) -> None:
        import mujoco

        every = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._options, None, camera, every, self._scene)

    def _out_of_view(self, data: Any) -> NDArray[np.bool_]:
        """Which geoms lie wholly outside the image: the robot's large meshes often do, and cost half of the time."""
        import mujoco

        camera = mujoco.mjv_averageCamera(*self._scene.camera)  # of two eyes
        right = np.cross(camera.forward, camera.up)
        offsets = data.geom_xpos - camera.pos
        depth = offsets @ camera.forward
        slope = camera.frustum_top / camera.frustum_near  # images are square: the same on all four sides
        radius = self._model.geom_rbound * np.sqrt(1 + slope**2)
        aside = np.maximum(np.abs(offsets @ right), np.abs(offsets @ camera.up))
        out: NDArray[np.bool_] = (aside - slope * depth > radius) & (radius > 0)  # planes have no bounds
        return out

    def _camera(self, view: View) -> tuple[Any, bool]:
        import mujoco

        camera = mujoco.MjvCamera()
        if isinstance(view, FixedView):
            camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
            camera.fixedcamid = self._model.camera(view.camera).id
            return camera, view.upside_down
        camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        camera.lookat[:] = view.lookat
        camera.distance, camera.azimuth, camera.elevation = view.distance, view.azimuth, view.elevation
        self._model.vis.global_.fovy = view.fovy
        return camera, False

    def close(self) -> None:
        """Release what was uploaded."""
        self._canvas.use()
        self._resources.free()
