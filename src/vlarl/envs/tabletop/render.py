"""Images of the tabletop world.

What rests on the table is painted once and cached (`_bases`); a step only adds what moves: the gripper, its shadow and
the object it holds. Sprites are cached at 4 x 4 subpixel positions, so moving by a third of a pixel changes the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vlarl.envs.tabletop import geometry as geo
from vlarl.envs.tabletop.background import paint_background
from vlarl.envs.tabletop.brush import Brush
from vlarl.envs.tabletop.geometry import IndexArray
from vlarl.envs.tabletop.objects import KIND_NAMES
from vlarl.envs.tabletop.sprites import DRAWER_LEVELS, GRIPPER_LEVELS, OVERLAYS, sprite
from vlarl.envs.tabletop.world import NOTHING, TabletopWorld
from vlarl.types import UInt8Array

Camera = Literal["agent", "wrist"]
UInt16Array = NDArray[np.uint16]

PHASES = 4  # subpixel positions along each axis
OPAQUE = 256  # alpha is kept in 1/256, so that blending is a multiplication and a shift


@dataclass(frozen=True)
class View:
    """A window on the image plane; a `follows` view is cut out of a larger canvas around the gripper."""

    image_size: int
    scale: float  # pixels a metre
    left: float
    top: float
    canvas: int  # pixels along each side of the canvas
    follows: bool


AGENT_WIDTH, AGENT_LEFT, AGENT_TOP = 0.72, -0.36, 0.41
WRIST_WIDTH = 0.26
WRIST_MARGIN = 0.46  # half the side of the canvas that wrist views are cut from, in metres


def make_view(camera: Camera, image_size: int) -> View:
    """The window of a camera at a resolution."""
    if camera == "agent":
        return View(image_size, image_size / AGENT_WIDTH, AGENT_LEFT, AGENT_TOP, image_size, follows=False)
    scale = image_size / WRIST_WIDTH
    return View(image_size, scale, -WRIST_MARGIN, WRIST_MARGIN, int(np.ceil(2 * WRIST_MARGIN * scale)), follows=True)


@dataclass(frozen=True)
class Atlas:
    """A sprite at one resolution: a patch for each subpixel phase."""

    color: UInt16Array  # [PHASES * PHASES, h, w * 3] premultiplied
    keep: UInt16Array  # [PHASES * PHASES, h, w * 3] how much of the background shows through, of OPAQUE
    up: int  # rows from the patch's top to the anchor's
    left: int  # columns from the patch's left to the anchor's


@lru_cache(maxsize=4096)
def make_atlas(name: str, scale: float) -> Atlas:
    """Paint a sprite at all subpixel phases."""
    shape = sprite(name)
    left, right = int(np.ceil(shape.half_width * scale)), int(np.ceil(shape.half_width * scale)) + 1
    up, down = int(np.ceil(shape.above * scale)), int(np.ceil(shape.below * scale)) + 1
    fine = 3 if scale < 150 else 1  # thin lines need supersampling only at low resolution
    phase = np.arange(PHASES) / PHASES
    columns = (np.arange((left + right) * fine) + 0.5) / fine - left
    rows = (np.arange((up + down) * fine) + 0.5) / fine - up
    u = (columns[None, None, None, :] - phase[None, :, None, None]) / scale
    v = (phase[:, None, None, None] - rows[None, None, :, None]) / scale
    brush = Brush(u, v, 1.0 / (scale * fine))
    shape.paint(brush)
    size = (PHASES * PHASES, up + down, fine, left + right, fine)
    rgb = brush.rgb.reshape(*size, 3).mean(axis=(2, 4))
    alpha = brush.alpha.reshape(size).mean(axis=(2, 4))
    flat = (PHASES * PHASES, up + down, (left + right) * 3)
    keep = np.repeat((OPAQUE - np.rint(alpha * OPAQUE))[..., None], 3, axis=3)
    color = np.minimum(np.rint(rgb * 255), 255 - ((255 * keep.astype(np.int64)) >> 8))
    return Atlas(color.astype(np.uint16).reshape(flat), keep.astype(np.uint16).reshape(flat), up, left)


class Renderer:
    """Paints rows of a world for one camera."""

    def __init__(self, world: TabletopWorld, camera: Camera, image_size: int) -> None:
        self.view = make_view(camera, image_size)
        self._world = world
        self._background = paint_background(self.view.canvas, self.view.scale, self.view.left, self.view.top)
        self._bases: list[UInt16Array | None] = [None] * world.num_envs
        self._signatures = np.full((world.num_envs, 5 * geo.MAX_SLOTS + 2), np.nan)

    def render(self, rows: IndexArray) -> UInt8Array:
        """[n, H, W, 3] what the camera sees in each row."""
        self._refresh(rows)
        world, view = self._world, self.view
        eef = world.eef[rows]
        centre_u, centre_v = eef[:, 0], geo.screen_up(eef[:, 1], np.zeros(len(rows)))
        size = view.image_size
        origin = np.zeros((len(rows), 2), dtype=np.intp)
        if view.follows:
            origin[:, 0] = np.rint((view.top - centre_v) * view.scale - size / 2)
            origin[:, 1] = np.rint((centre_u - view.left) * view.scale - size / 2)
        images = np.empty((len(rows), size, size * 3), dtype=np.uint16)
        opening = np.rint(world.finger_opening(rows) * (GRIPPER_LEVELS - 1)).astype(int).tolist()
        poses = zip(
            rows.tolist(),
            origin.tolist(),
            centre_u.tolist(),
            centre_v.tolist(),
            geo.screen_up(eef[:, 1], eef[:, 2]).tolist(),
            strict=True,
        )
        for i, (row, (top, left), u, ground_v, v) in enumerate(poses):
            base = self._bases[row]
            assert base is not None
            canvas = images[i]
            canvas[...] = base[top : top + size, left * 3 : (left + size) * 3]
            origin_i = (top, left)
            self._lay(canvas, "shadow:gripper", u, ground_v, origin_i)
            if world.held[row] != NOTHING:
                self._paint_held(canvas, row, origin_i)
            self._lay(canvas, f"gripper:{opening[i]}", u, v, origin_i)
        return images.astype(np.uint8).reshape(len(rows), size, size, 3)

    def _refresh(self, rows: IndexArray) -> None:
        """Repaint the bases of rows where something at rest has changed."""
        world = self._world
        position = world.position[rows].copy()
        held = world.held[rows]
        holding = held != NOTHING
        position[holding, held[holding]] = 0.0  # what is held is not part of the base
        parts = [position.reshape(len(rows), 3 * geo.MAX_SLOTS), world.kind[rows], world.support[rows], held[:, None]]
        signature = np.concatenate([*parts, world.stove_on[rows, None]], axis=1)
        for i in np.flatnonzero((signature != self._signatures[rows]).any(axis=1)):
            self._paint_base(int(rows[i]))
        self._signatures[rows] = signature

    def _paint_base(self, row: int) -> None:
        world = self._world
        base = self._background.copy()
        self._bases[row] = base
        slots = [int(s) for s in np.flatnonzero(world.kind[row]) if s != world.held[row]]
        standing = sorted((s for s in slots if world.support[row, s] == NOTHING), key=lambda s: self._nearness(row, s))
        for slot in standing:
            self._blend_slot(base, row, slot, "shadow:" + KIND_NAMES[world.kind[row, slot]])
        for slot in standing:
            self._paint_tree(base, row, slot)

    def _nearness(self, row: int, slot: int) -> float:
        return -float(self._world.position[row, slot, 1])

    def _paint_tree(self, canvas: UInt16Array, row: int, slot: int, origin: tuple[int, int] = (0, 0)) -> None:
        """Paint an object, what rests on it, and the part of it that hides what rests in it."""
        world = self._world
        self._blend_slot(canvas, row, slot, self._sprite_name(row, slot), origin)
        riders = [int(s) for s in np.flatnonzero(world.support[row] == slot) if s != world.held[row]]
        for rider in sorted(riders, key=lambda s: self._nearness(row, s)):
            self._paint_tree(canvas, row, rider, origin)
        overlay = OVERLAYS.get(KIND_NAMES[world.kind[row, slot]])
        if overlay:
            self._blend_slot(canvas, row, slot, overlay, origin)

    def _paint_held(self, canvas: UInt16Array, row: int, origin: tuple[int, int]) -> None:
        slot = int(self._world.held[row])
        name = KIND_NAMES[self._world.kind[row, slot]]
        self._blend_slot(canvas, row, slot, "shadow:" + name, origin, on_table=True)
        self._paint_tree(canvas, row, slot, origin)

    def _sprite_name(self, row: int, slot: int) -> str:
        name: str = KIND_NAMES[self._world.kind[row, slot]]
        if name == "drawer":
            extension = self._world.start[row, slot, 1] - self._world.position[row, slot, 1]
            return f"drawer:{round(extension / geo.DRAWER_TRAVEL * (DRAWER_LEVELS - 1))}"
        burning = bool(self._world.stove_on[row]) and name in ("stove", "knob")
        return name + "_on" if burning else name

    def _blend_slot(
        self,
        canvas: UInt16Array,
        row: int,
        slot: int,
        name: str,
        origin: tuple[int, int] = (0, 0),
        on_table: bool = False,
    ) -> None:
        x, y, z = self._world.position[row, slot].tolist()
        self._lay(canvas, name, x, geo.screen_up(y, 0.0 if on_table else z), origin)

    def _lay(self, canvas: UInt16Array, name: str, u: float, v: float, origin: tuple[int, int]) -> None:
        """Lay a sprite on a canvas [h, w * 3] with its anchor at (u, v), cut off at the borders."""
        view = self.view
        atlas = make_atlas(name, view.scale)
        row, row_phase = divmod(round((view.top - v) * view.scale * PHASES), PHASES)
        column, column_phase = divmod(round((u - view.left) * view.scale * PHASES), PHASES)
        phase = row_phase * PHASES + column_phase
        keep, color = atlas.keep[phase], atlas.color[phase]
        top, left = row - origin[0] - atlas.up, 3 * (column - origin[1] - atlas.left)
        height, width = keep.shape
        r0, r1 = max(top, 0), min(top + height, canvas.shape[0])
        c0, c1 = max(left, 0), min(left + width, canvas.shape[1])
        if r0 >= r1 or c0 >= c1:
            return
        patch = canvas[r0:r1, c0:c1]
        patch *= keep[r0 - top : r1 - top, c0 - left : c1 - left]
        patch >>= 8
        patch += color[r0 - top : r1 - top, c0 - left : c1 - left]
