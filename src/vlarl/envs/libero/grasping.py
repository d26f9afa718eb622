"""Grasps of an object by a parallel gripper that points down, planned from the shapes of the scene.

    collision geoms ── boxes ── height map from above ── grasps ── the cheapest one

A grasp needs free ground under both open fingers and under the palm, and a part of the object between the pads. So a
bowl is grasped by its rim and a box across its narrow side, without rules for bowls or boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.envs.libero.physics import Float64Array

# The Panda hand in metres; heights relative to its grip site, `along` the direction in which the fingers move.
FINGER_ALONG = (0.034, 0.070)  # of an open finger, from the middle
FINGER_ACROSS = 0.014
FINGER_TIP = 0.0125  # below the grip site
PALM_ALONG, PALM_ACROSS = 0.108, 0.036
PALM_BOTTOM = 0.026  # above the grip site
PAD_ACROSS = 0.006
TIP_GAP, PALM_GAP = 0.001, 0.004  # kept free below
GOOD_DEPTH = 0.018  # of the object's top above the grip site; more holds no better

TURNS = np.arange(-75, 91, 15)  # degrees of the wrist; the hand is symmetric under 180
SHIFT_ALONG, SHIFT_ACROSS = (-0.08, 0.08), 0.03  # of the hand from the middle of the object

ALIKE, ALIKE_TURN = 0.015, np.radians(20)  # nearer grasps are alike
REPEATED = 10.0  # cost of a grasp like one that has failed

CELL = 0.005  # of the grids
REACH = 0.20  # of the map around an object


@dataclass(frozen=True)
class Boxes:
    """Oriented boxes around collision geoms."""

    centres: Float64Array  # [G, 3]
    rotations: Float64Array  # [G, 3, 3] columns are the boxes' axes
    halves: Float64Array  # [G, 3]

    def tops(self, points: Float64Array) -> Float64Array:
        """Heights of the highest box over each point [N, 2]; -inf if there is none."""
        if not len(self.centres):
            return np.full(len(points), -np.inf)
        down = -self.rotations[:, 2, :] + 1e-9  # [G, 3] in each box's frame, never exactly parallel to a face
        start = np.pad(points, ((0, 0), (0, 1)))[:, None, :] - self.centres  # [N, G, 3]
        start = np.einsum("ngi,gij->ngj", start, self.rotations)
        faces = np.stack([(-self.halves - start) / down, (self.halves - start) / down])
        enter, leave = faces.min(axis=0).max(axis=-1), faces.max(axis=0).min(axis=-1)
        heights: Float64Array = np.where(enter <= leave, -enter, -np.inf).max(axis=1)
        return heights

    def corners(self) -> Float64Array:
        """[8 G, 3] in the world."""
        signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, -1).T
        local = signs[None] * self.halves[:, None]
        corners: Float64Array = self.centres[:, None] + np.einsum("gcj,gij->gci", local, self.rotations)
        return corners.reshape(-1, 3)


class Scene:
    """The current shapes of a simulator's objects, without the robot."""

    def __init__(self, simulator: Any) -> None:
        self._simulator = simulator
        model = simulator.sim.model
        self._roots = model.body_rootid[model.geom_bodyid]
        robot = model.body_rootid[model.site_bodyid[simulator.robots[0].eef_site_id]]
        self._solid = ((model.geom_contype | model.geom_conaffinity) != 0) & (self._roots != robot)

    def object_boxes(self, name: str) -> Boxes:
        """The boxes of one object."""
        return self._boxes(self._solid & (self._roots == self._root(name)))

    def others(self, name: str, around: Float64Array, radius: float) -> Boxes:
        """The boxes of everything but this object that reach within `radius` of a point [2]."""
        model, data = self._simulator.sim.model, self._simulator.sim.data
        away = np.linalg.norm(data.geom_xpos[:, :2] - around, axis=1)
        unbounded = model.geom_rbound == 0  # planes
        near = unbounded | (away < radius + model.geom_rbound)
        return self._boxes(self._solid & near & (self._roots != self._root(name)))

    def _root(self, name: str) -> int:
        return int(self._simulator.sim.model.body_rootid[self._simulator.obj_body_id[name]])

    def _boxes(self, geoms: NDArray[np.bool_]) -> Boxes:
        model, data = self._simulator.sim.model, self._simulator.sim.data
        rotations = data.geom_xmat[geoms].reshape(-1, 3, 3)
        bounds = model.geom_aabb[geoms]
        centres = data.geom_xpos[geoms] + np.einsum("gij,gj->gi", rotations, bounds[:, :3])
        return Boxes(centres, rotations, bounds[:, 3:])


class Map:
    """Surface heights of an object and of everything else on a grid around a point [2]."""

    def __init__(self, scene: Scene, name: str, around: Float64Array) -> None:
        self._corner = around - REACH
        ticks = np.arange(-REACH, REACH + CELL / 2, CELL)
        points = around + np.stack(np.meshgrid(ticks, ticks, indexing="ij"), axis=-1).reshape(-1, 2)
        self.object = scene.object_boxes(name).tops(points).reshape(len(ticks), -1)
        self.others = scene.others(name, around, 1.5 * REACH).tops(points).reshape(len(ticks), -1)

    def cells(self, points: Float64Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Indices of the cells under points [..., 2]."""
        index = np.rint((points - self._corner) / CELL).astype(np.intp).clip(0, len(self.object) - 1)
        return index[..., 0], index[..., 1]


@dataclass(frozen=True)
class Grasp:
    """A pose of the gripper around an object."""

    position: Float64Array  # [3] of the grip site
    turn: float  # of the wrist from its rest, in radians


def hand_points(at: Float64Array, turn: float, along: tuple[float, float], across: float) -> Float64Array:
    """[..., N, 2] grid over a part of the hand at positions [..., 2], `along` and `across` its fingers."""
    direction, normal = _axes(turn)
    a, b = np.meshgrid(_ticks(*along), _ticks(-across, across), indexing="ij")
    return at[..., None, :] + a.reshape(-1, 1) * direction + b.reshape(-1, 1) * normal


def lowest_grip(chart: Map, surface: Float64Array, at: Float64Array, turn: float) -> Float64Array:
    """Least heights of the grip site at positions [..., 2] over a surface of a map, with open fingers."""
    fingers = [hand_points(at, turn, along, FINGER_ACROSS) for along in (FINGER_ALONG, _mirrored(FINGER_ALONG))]
    palm = hand_points(at, turn, (-PALM_ALONG, PALM_ALONG), PALM_ACROSS)
    under_fingers = surface[chart.cells(np.concatenate(fingers, axis=-2))].max(axis=-1)
    under_palm = surface[chart.cells(palm)].max(axis=-1)
    heights: Float64Array = np.maximum(under_fingers + FINGER_TIP + TIP_GAP, under_palm - PALM_BOTTOM + PALM_GAP)
    return heights


def resting_surface(chart: Map, at: Float64Array) -> float:
    """Height of the surface under an object that is put down at a point [2]."""
    base = 0.02 * np.array([[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0]])
    return float(chart.others[chart.cells(at + base)].max())


def plan_grasp(
    scene: Scene, name: str, gripper: Float64Array, shift: Float64Array, failed: Sequence[Grasp] = ()
) -> Grasp | None:
    """The cheapest grasp of an object that is to be moved by `shift` [2], for a gripper at this position [3].

    Grasps like those that have `failed` are avoided, if there are others. None if the hand fits nowhere.
    """
    corners = scene.object_boxes(name).corners()
    middle = (corners.min(axis=0) + corners.max(axis=0))[:2] / 2
    transfer = _Transfer(
        corners,
        middle,
        shift,
        gripper,
        here=Map(scene, name, middle),
        there=Map(scene, name, middle + shift),
        failed=tuple(failed),
    )
    cost, grasp = min((transfer.best_at_turn(turn) for turn in np.radians(TURNS)), key=lambda choice: choice[0])
    return grasp if np.isfinite(cost) else None


@dataclass(frozen=True)
class _Transfer:
    """An object, where it is and where it has to go."""

    corners: Float64Array  # [C, 3] of the object
    middle: Float64Array  # [2] of the object
    shift: Float64Array  # [2]
    gripper: Float64Array  # [3]
    here: Map
    there: Map
    failed: tuple[Grasp, ...]

    def best_at_turn(self, turn: float) -> tuple[float, Grasp]:
        """The cheapest grasp at this turn of the wrist, and its cost."""
        here = self.here
        direction, normal = _axes(turn)
        at = hand_points(self.middle, turn, SHIFT_ALONG, SHIFT_ACROSS)  # [S, 2]
        heights = lowest_grip(here, np.maximum(here.object, here.others), at, turn)  # [S]
        pads = hand_points(at, turn, (-FINGER_ALONG[0], FINGER_ALONG[0]), PAD_ACROSS)  # [S, N, 2]
        between = here.object[here.cells(pads)]
        depth = between.max(axis=1) - heights
        blocked = (here.others[here.cells(pads)] > heights[:, None] - FINGER_TIP).any(axis=1)
        held = between > heights[:, None]
        along = (pads - at[:, None]) @ direction
        first, last = np.where(held, along, 1.0).min(axis=1), np.where(held, along, -1.0).max(axis=1)
        cost = (
            np.abs(first + last) / 2 / 0.005
            + np.abs((at - self.middle) @ normal) / 0.005
            + np.maximum(GOOD_DEPTH - depth, 0) / 0.002
            + self._drop(at, heights, turn) / 0.01
            + np.linalg.norm(at - self.gripper[:2], axis=1) / 0.1
            + np.ptp(self.corners[:, :2] @ direction)
            / 0.02  # the width of the object: avoids grasping a box diagonally
            + abs(turn)
            + self._repeated(at, turn) * REPEATED
        )
        cost = np.where((depth > 0) & ~blocked, cost, np.inf)
        choice = int(cost.argmin())
        return float(cost[choice]), Grasp(np.append(at[choice], heights[choice]), turn)

    def _repeated(self, at: Float64Array, turn: float) -> Float64Array:
        """[S] how many grasps like this one have failed."""
        alike = [each for each in self.failed if abs(each.turn - turn) < ALIKE_TURN]
        counts: Float64Array = np.zeros(len(at))
        for each in alike:
            counts += np.linalg.norm(at - each.position[:2], axis=1) < ALIKE
        return counts

    def _drop(self, at: Float64Array, heights: Float64Array, turn: float) -> Float64Array:
        """[S] how far the object would fall when released at the target, because the hand fits no lower there."""
        below = heights - self.corners[:, 2].min()
        resting = resting_surface(self.there, self.middle + self.shift) + below
        drop: Float64Array = lowest_grip(self.there, self.there.others, at + self.shift, turn) - resting
        return drop.clip(min=0)


def _axes(turn: float) -> tuple[Float64Array, Float64Array]:
    """Directions [2] along and across the fingers; at rest they move along the world's y axis."""
    direction = np.array([-np.sin(turn), np.cos(turn)])
    return direction, np.array([direction[1], -direction[0]])


def _ticks(first: float, last: float) -> Float64Array:
    return np.linspace(first, last, round((last - first) / CELL) + 1)


def _mirrored(interval: tuple[float, float]) -> tuple[float, float]:
    return -interval[1], -interval[0]
