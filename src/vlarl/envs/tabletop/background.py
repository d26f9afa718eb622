"""The empty table: planks, a front edge, the floor around it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vlarl.envs.tabletop.brush import Brush
from vlarl.envs.tabletop.geometry import DEPTH_TO_SCREEN, Float64Array

HALF_WIDTH = 0.335
BACK = DEPTH_TO_SCREEN * 0.335
FRONT = -BACK
PLANK = 0.112  # width of a plank on the screen
EDGE = 0.026  # thickness of the table top on the screen


@lru_cache(maxsize=16)
def paint_background(canvas: int, scale: float, left: float, top: float) -> NDArray[np.uint16]:
    """[canvas, canvas * 3] the empty table, for a window on the image plane."""
    fine = 2
    steps = (np.arange(canvas * fine, dtype=np.float64) + 0.5) / (scale * fine)
    brush = Brush((left + steps)[None, :], (top - steps)[:, None], 1.0 / (scale * fine))
    brush.blend(np.ones_like(brush.u), _floor(brush.v))
    shade = np.clip(brush.box(-HALF_WIDTH + 0.01, HALF_WIDTH + 0.01, FRONT - 0.05, BACK, 0.02) / 0.05, 0, 1)
    brush.blend(0.35 * (1 - shade), (0.0, 0.0, 0.0))
    brush.fill(brush.box(-HALF_WIDTH, HALF_WIDTH, FRONT - EDGE, BACK, 0.008), (0.46, 0.31, 0.18))
    brush.fill(brush.box(-HALF_WIDTH, HALF_WIDTH, FRONT, BACK, 0.008), _planks(brush.u, brush.v))
    brush.fill(brush.box(-HALF_WIDTH, HALF_WIDTH, FRONT, FRONT + 0.003), (0.93, 0.80, 0.62), alpha=0.7)
    rgb = brush.rgb.reshape(canvas, fine, canvas, fine, 3).mean(axis=(1, 3))
    image: NDArray[np.uint16] = np.rint(255 * np.clip(rgb, 0, 1)).astype(np.uint16).reshape(canvas, canvas * 3)
    image.setflags(write=False)
    return image


def _floor(v: Float64Array) -> Float64Array:
    light = 0.9 + 0.5 * np.clip(v, -0.4, 0.5)
    color: Float64Array = light[..., None] * np.array([0.36, 0.40, 0.45])
    return color


def _planks(u: Float64Array, v: Float64Array) -> Float64Array:
    """Long boards across the table, each with its own tone and grain, lit from the left."""
    board = np.floor((v - FRONT) / PLANK)
    tone = 1.0 + 0.025 * np.sin(board * 2.4 + 0.7)
    bend = 0.006 * np.sin(9 * u + 1.7 * board)
    grain = 0.012 * np.sin(260 * (v + bend) + 5 * board) + 0.008 * np.sin(611 * (v + bend) + 3 * u)
    seam = np.abs((v - FRONT) / PLANK - np.rint((v - FRONT) / PLANK)) * PLANK
    seams = 1.0 - 0.10 * np.exp(-((seam / 0.0022) ** 2))
    light = 1.03 - 0.16 * u - 0.05 * ((u / 0.33) ** 2 + (v / 0.27) ** 2)
    color: Float64Array = np.clip(((tone + grain) * seams * light)[..., None] * np.array([0.84, 0.70, 0.53]), 0, 1)
    return color
