"""Constants of the tabletop world and its projection: x to the right, y away from the viewer, z up, in metres.

The table is about 0.6 wide. Distances that decide success are given as fractions of its width, as in the recipe.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]
IndexArray = NDArray[np.intp]
BoolArray = NDArray[np.bool_]

TABLE_WIDTH = 0.6
STEP_LENGTH = 0.05  # an action of 1 moves the gripper this far
STEP_ANGLE = 0.05  # radians for an action of 1
MAX_ANGLE = 0.3
FINGER_SPEED = 0.5  # of the whole opening, a step: closing and opening take two steps, so one stray command is harmless
FINGER_TRAVEL = 0.04  # half the distance of wide-open fingers

GRASP_RADIUS = 0.06 * TABLE_WIDTH
GRASP_HEIGHT_TOLERANCE = 0.03
PLACE_RADIUS = 0.08 * TABLE_WIDTH
PUSH_HEIGHT = 0.035  # a gripper lower than this pushes what can be pushed
PUSH_TOLERANCE = PLACE_RADIUS
DRAWER_TRAVEL = 0.11
DRAWER_OPEN = 0.075  # extension from which a drawer counts as open and takes objects
SLIP_DISTANCE = 0.07  # a handle slips out of the fingers beyond this

EEF_LOW = np.array([-0.30, -0.30, 0.012])
EEF_HIGH = np.array([0.30, 0.30, 0.30])
EEF_HOME = np.array([0.0, 0.0, 0.20])

# Orthographic view from the front at an elevation of 53 degrees: a 3-4-5 triangle.
DEPTH_TO_SCREEN = 0.8
HEIGHT_TO_SCREEN = 0.6

MAX_SLOTS = 10  # objects in a scene
MAX_GOALS = 2


Coordinate = TypeVar("Coordinate", float, Float64Array)


def screen_up(y: Coordinate, z: Coordinate) -> Coordinate:
    """How high a point appears on the screen, in metres of the image plane."""
    return DEPTH_TO_SCREEN * y + HEIGHT_TO_SCREEN * z


# Bounds of the proprio vector, for policies that normalise it.
PROPRIO_LOW = (*EEF_LOW.tolist(), -MAX_ANGLE, -MAX_ANGLE, -MAX_ANGLE, 0.0, -FINGER_TRAVEL)
PROPRIO_HIGH = (*EEF_HIGH.tolist(), MAX_ANGLE, MAX_ANGLE, MAX_ANGLE, FINGER_TRAVEL, 0.0)
