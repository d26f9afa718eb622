"""The catalogue of objects on the table: their sizes and how the gripper can act on them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from vlarl.envs.tabletop.geometry import PLACE_RADIUS


class Grip(IntEnum):
    """What closing the gripper on an object does."""

    NONE = 0
    CARRY = 1
    SLIDE = 2  # a drawer: follows the gripper along its rail
    TWIST = 3  # a knob: turns the stove on


@dataclass(frozen=True)
class Kind:
    """One kind of object."""

    name: str
    radius: float  # footprint, for keeping initial states free of overlaps
    height: float
    grip: Grip = Grip.NONE
    grasp_height: float = 0.0  # of the fingertips above the base
    grip_width: float = 0.0  # finger opening while held, 0 to 1
    surface: float = -1.0  # height at which objects rest on it; negative: none can
    place_radius: float = PLACE_RADIUS
    place_offset: float = 0.0  # along y, from its position to where objects are placed
    pushable: bool = False


def _carried(name: str, radius: float, height: float, grasp: float, width: float, surface: float = -1.0) -> Kind:
    return Kind(name, radius, height, Grip.CARRY, grasp, width, surface)


_CATALOGUE = (
    Kind("none", 0.0, 0.0),
    _carried("bowl", 0.042, 0.045, 0.03, 0.8, surface=0.012),
    Kind("plate", 0.06, 0.012, surface=0.01, pushable=True),
    Kind("ramekin", 0.033, 0.03, surface=0.024),
    Kind("cookie_box", 0.05, 0.035, surface=0.035),
    Kind("stove", 0.08, 0.03, surface=0.03),
    Kind("knob", 0.015, 0.03, Grip.TWIST, 0.025, 0.2),
    Kind("cabinet", 0.08, 0.11, surface=0.11),
    Kind("drawer", 0.05, 0.06, Grip.SLIDE, 0.035, 0.2, surface=0.015, place_radius=0.045, place_offset=0.05),
    Kind("rack", 0.05, 0.03, surface=0.03),
    Kind("basket", 0.078, 0.06, surface=0.008, place_radius=0.06),
    _carried("wine_bottle", 0.025, 0.14, 0.06, 0.45),
    _carried("cream_cheese", 0.032, 0.024, 0.018, 0.6),
    _carried("butter", 0.032, 0.022, 0.018, 0.6),
    _carried("pudding", 0.032, 0.03, 0.02, 0.6),
    _carried("milk", 0.028, 0.1, 0.05, 0.55),
    _carried("orange_juice", 0.028, 0.1, 0.05, 0.55),
    _carried("alphabet_soup", 0.027, 0.065, 0.04, 0.55),
    _carried("tomato_sauce", 0.027, 0.065, 0.04, 0.55),
    _carried("ketchup", 0.025, 0.105, 0.05, 0.45),
    _carried("bbq_sauce", 0.025, 0.105, 0.05, 0.45),
    _carried("salad_dressing", 0.025, 0.105, 0.05, 0.45),
    _carried("moka_pot", 0.03, 0.085, 0.045, 0.6),
    _carried("white_mug", 0.03, 0.055, 0.035, 0.6),
    _carried("yellow_mug", 0.03, 0.055, 0.035, 0.6),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _CATALOGUE}
KIND_NAMES: tuple[str, ...] = tuple(KINDS)
KIND_IDS: dict[str, int] = {name: i for i, name in enumerate(KIND_NAMES)}

# The same table by column, to be indexed with arrays of kind ids.
GRIP = np.array([k.grip for k in _CATALOGUE])
GRASP_HEIGHT = np.array([k.grasp_height for k in _CATALOGUE])
GRIP_WIDTH = np.array([k.grip_width for k in _CATALOGUE])
SURFACE = np.array([k.surface for k in _CATALOGUE])
PLACE_RADII = np.array([k.place_radius for k in _CATALOGUE])
PLACE_OFFSET = np.array([k.place_offset for k in _CATALOGUE])
RADIUS = np.array([k.radius for k in _CATALOGUE])
PUSHABLE = np.array([k.pushable for k in _CATALOGUE])
