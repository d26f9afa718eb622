"""Small named transforms of columns [T, C], from which mappings of datasets are put together.

Conventions of a gripper differ most. A policy's is absolute: 1 open, 0 closed.

    recorded as                                  through
    -1 open, 1 closed; or 0 open, 1 closed       clip | invert,  invert
    1 open, 0 closed, with values in between     binarise
    1 closes, -1 opens, 0 leaves it as it is     absolute
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vlarl.types import FloatArray

OPEN, CLOSED = 0.95, 0.05  # beyond these a gripper counts as open or closed
MOVES = 0.1  # a relative gripper command of less changes nothing
GIMBAL = 1e-6  # nearer to a pitch of 90 degrees, roll and yaw can't be told apart

Transform = Callable[[FloatArray], FloatArray]


def clip(values: FloatArray) -> FloatArray:
    """Limit values to [0, 1]."""
    clipped: FloatArray = np.clip(values, 0.0, 1.0)
    return clipped


def invert(values: FloatArray) -> FloatArray:
    """Exchange 0 and 1."""
    return 1 - values


def binarise(values: FloatArray) -> FloatArray:
    """0 or 1: while a gripper moves, the state that it arrives at; at the end of an episode, its last value."""
    settled = (values > OPEN) | (values < CLOSED)
    result = np.where(settled, values > OPEN, values[-1:]).astype(np.float32)
    steps = np.arange(len(values))[:, None]
    following = np.where(settled, steps, len(values) - 1)
    nearest = np.minimum.accumulate(following[::-1], axis=0)[::-1]  # the next step at which it is settled
    arrived: FloatArray = np.take_along_axis(result, nearest, axis=0)
    return arrived


def absolute(values: FloatArray) -> FloatArray:
    """Commands 1 (close), -1 (open) and 0 (none) as the state that they lead to, 1 open and 0 closed.

    The first command changes the state, so that before it the gripper was in the other one; without any, it is open.
    """
    commands = np.where(values < -MOVES, 1, np.where(values > MOVES, -1, 0))  # 1 opens, -1 closes
    given = commands != 0
    first = np.take_along_axis(commands, given.argmax(axis=0)[None], axis=0)
    before = np.where(given.any(axis=0), -first, 1)
    steps = np.arange(len(values))[:, None]
    latest = np.maximum.accumulate(np.where(given, steps, -1), axis=0)
    state = np.where(latest < 0, before, np.take_along_axis(commands, np.maximum(latest, 0), axis=0))
    opened: FloatArray = (state > 0).astype(np.float32)
    return opened


def euler(quaternions: FloatArray) -> FloatArray:
    """[T, 4] x, y, z, w as [T, 3] roll, pitch and yaw, applied in this order about fixed axes."""
    wide = quaternions.astype(np.float64)
    x, y, z, w = (wide / np.linalg.norm(wide, axis=1, keepdims=True)).T
    sine = np.clip(2 * (w * y - x * z), -1, 1)
    pitch = np.arcsin(sine)
    roll = np.arctan2(2 * (w * x + y * z), 1 - 2 * (x * x + y * y))
    yaw = np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    locked = np.abs(sine) > 1 - GIMBAL
    roll = np.where(locked, 2 * np.arctan2(x, w), roll)
    yaw = np.where(locked, 0.0, yaw)
    angles: FloatArray = np.stack([roll, pitch, yaw], axis=1).astype(np.float32)
    return angles


TRANSFORMS: dict[str, Transform] = {
    "clip": clip,
    "invert": invert,
    "binarise": binarise,
    "absolute": absolute,
    "euler": euler,
}
