"""A scripted demonstrator of LIBERO's pick-and-place tasks, over the simulator's privileged state.

    unmet goal ── fetch: rise, over the thing, down, close ── bring: lift, over the target, lower, open ── again

The script is a generator of waypoints. It looks at the scene whenever it plans the next ones, so a thing that slipped
is fetched again. Motion is proportional control towards the waypoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlarl.envs.libero.env import LiberoEnv
from vlarl.envs.libero.grasping import (
    FINGER_TIP,
    PALM_ALONG,
    PALM_BOTTOM,
    Boxes,
    Grasp,
    Map,
    Scene,
    lowest_grip,
    plan_grasp,
    resting_surface,
)
from vlarl.envs.libero.physics import Float64Array
from vlarl.errors import UsageError
from vlarl.types import FloatArray

SUPPORTED = {
    "libero_spatial": frozenset(range(10)),
    "libero_object": frozenset(range(10)),
    "libero_goal": frozenset({1, 2, 4, 6, 8, 9}),
    "libero_10": frozenset({0, 1, 4, 5, 6, 7}),
}
"""Tasks that it has been seen to solve from at least nine initial states of ten. The others have drawers and knobs."""

OPEN, CLOSED = 1.0, 0.0
STEP, TURN = 0.05, 0.5  # metres and radians that a full deflection asks of robosuite's OSC_POSE controller
GAIN = 3.0  # the controller lags: asked for more than the way that is left, it arrives sooner
AHEAD = 2.0  # steps for which the gripper is taken to move on as it does, against overshooting
HOVER = 0.05  # above a grasp, where the gripper lines up
CLEARANCE = 0.025  # over anything on the way
ROOM = 0.08  # to either side of the way
TILTED = 0.1  # radians; less is left alone
SLIPPED = 0.03  # metres that a thing has moved in the hand
RESTING = 0.01  # metres a second of a finger


def supports(suite: str, task_id: int) -> bool:
    """Whether the expert can demonstrate a task."""
    return task_id in SUPPORTED.get(suite, frozenset())


@dataclass(frozen=True)
class Waypoint:
    """Where the gripper should be, and when that is good enough."""

    position: Float64Array  # [3]
    turn: float
    gripper: float
    near: float = 0.01  # metres, horizontally
    level: float = 0.02  # metres, vertically
    grips: bool = False  # it takes until the fingers rest
    patience: int = 60  # steps after which the script goes on regardless


class LiberoExpert:
    """Plays the episode that its environment has started, as a policy would: deltas, and 1 for an open gripper."""

    def __init__(self, env: LiberoEnv) -> None:
        self._env = env

    def reset(self) -> None:
        """Look at the episode that the environment has just started; UsageError where its goal is out of reach."""
        self._simulator = self._env.simulator
        self._goals = _placements(self._simulator)
        self._scene = Scene(self._simulator)
        self._turn = 0.0
        self._before = self._gripper()
        self._script = self._play()
        self._waypoint = next(self._script)
        self._age = 0

    def act(self) -> FloatArray:
        """The next action [7]."""
        if self._reached():
            self._waypoint = next(self._script)
            self._age = 0
        self._age += 1
        here = self._gripper()
        soon = here + AHEAD * (here - self._before)
        self._before = here
        move = GAIN * (self._waypoint.position - soon) / STEP
        move /= max(np.abs(move).max(), 1.0)  # one factor, so that long ways are straight lines
        tilt = self._tilt(self._waypoint.turn)
        turn = tilt / TURN if np.linalg.norm(tilt) > TILTED else np.zeros(3)
        return np.concatenate([move, turn.clip(-1, 1), [self._waypoint.gripper]]).astype(np.float32)

    def _reached(self) -> bool:
        goal, way = self._waypoint, self._waypoint.position - self._gripper()
        arrived = np.linalg.norm(way[:2]) < goal.near and abs(way[2]) < goal.level
        turned = np.linalg.norm(self._tilt(goal.turn)) < 2 * TILTED
        gripped = not goal.grips or (self._age > 3 and self._fingers_rest())
        return bool((arrived and turned and gripped) or self._age >= goal.patience)

    def _play(self) -> Iterator[Waypoint]:
        while True:
            unmet = [goal for goal in self._goals if not self._simulator._eval_predicate(goal)]
            _, thing, target = unmet[0] if unmet else self._goals[0]
            shift = (self._place(target) - self._position(thing))[:2]
            grasp = plan_grasp(self._scene, thing, self._gripper(), shift) if unmet else None
            if grasp is None:  # nothing is left to do, or the thing lies where no hand fits
                yield self._towards(self._gripper(), OPEN, near=0.0, patience=20)
            else:
                yield from self._fetch(thing, grasp)
                yield from self._bring(thing, target)

    def _fetch(self, thing: str, grasp: Grasp) -> Iterator[Waypoint]:
        """Rise, go over the thing, down around it, close."""
        rise, hover = self._heights(thing, grasp.position[:2], np.zeros(2), FINGER_TIP)
        if self._gripper()[2] < rise:
            yield self._towards(_at(self._gripper(), rise), OPEN, near=0.05)
        self._turn = grasp.turn
        yield self._towards(_at(grasp.position, max(hover, grasp.position[2] + HOVER)), OPEN)
        yield self._towards(grasp.position, OPEN, level=0.006, patience=20)
        yield self._towards(grasp.position, CLOSED, near=0.05, level=0.05, grips=True, patience=20)

    def _bring(self, thing: str, target: str) -> Iterator[Waypoint]:
        """Lift, carry over the target, lower, open; given up when the thing slips."""
        held = self._held(thing)
        rise, hover = self._heights(thing, (self._place(target) - held)[:2], held[:2], self._overhang(thing))
        yield self._towards(_at(self._gripper(), rise), CLOSED, near=0.05, level=0.015)
        if np.linalg.norm(self._held(thing) - held) > SLIPPED:
            return
        held = self._held(thing)
        yield self._towards(_at(self._place(target) - held, hover), CLOSED)
        if np.linalg.norm(self._held(thing) - held) > SLIPPED:
            return
        goal = self._place(target) - self._held(thing)
        yield self._towards(_at(goal, self._release_height(thing, goal)), CLOSED, level=0.006, patience=40)
        yield self._towards(self._gripper(), OPEN, near=0.0, patience=10)  # the hand opens, the thing comes to rest

    def _towards(self, position: Float64Array, gripper: float, **until: Any) -> Waypoint:
        return Waypoint(position, self._turn, gripper, **until)

    def _gripper(self) -> Float64Array:
        return np.array(self._simulator.sim.data.site_xpos[self._simulator.robots[0].eef_site_id])

    def _position(self, thing: str) -> Float64Array:
        return np.array(self._simulator.sim.data.body_xpos[self._simulator.obj_body_id[thing]])

    def _place(self, target: str) -> Float64Array:
        return np.array(self._simulator.object_states_dict[target].get_geom_state()["pos"])

    def _held(self, thing: str) -> Float64Array:
        """Where a thing is [3], seen from the gripper."""
        return self._position(thing) - self._gripper()

    def _overhang(self, thing: str) -> float:
        """How far a thing reaches below the grip site."""
        return float(self._gripper()[2] - self._scene.thing(thing).corners()[:, 2].min())

    def _fingers_rest(self) -> bool:
        speeds = self._simulator.sim.data.qvel[self._simulator.robots[0]._ref_gripper_joint_vel_indexes]
        return bool(np.abs(speeds).max() < RESTING)

    def _tilt(self, turn: float) -> Float64Array:
        """Rotation vector [3] from the gripper's orientation to that of a hand that points down, turned so."""
        now = self._simulator.sim.data.site_xmat[self._simulator.robots[0].eef_site_id].reshape(3, 3)
        cos, sin = np.cos(turn), np.sin(turn)
        wanted = np.array([[-sin, cos, 0], [cos, sin, 0], [0, 0, -1]])
        rotation: Float64Array = np.cross(now.T, wanted.T).sum(axis=0) / 2
        return rotation

    def _heights(self, thing: str, end: Float64Array, held: Float64Array, overhang: float) -> tuple[float, float]:
        """Heights at both ends of the gripper's straight way to `end` [2], where it clears everything.

        What it carries is `held` [2] beside it and reaches down by `overhang`.
        """
        start = self._gripper()[:2]
        length = float(np.linalg.norm(end - start))
        share = np.linspace(0, 1, int(length / 0.02) + 2)
        way = start + share[:, None] * (end - start)
        others = self._scene.others(thing, (start + end) / 2, length / 2 + 2 * ROOM)
        needed = CLEARANCE + np.maximum(
            _highest_along(others, way + held, ROOM) + overhang, _highest_along(others, way, PALM_ALONG) - PALM_BOTTOM
        )
        first, second = share <= 0.5, share > 0.5
        rise = max(float(self._gripper()[2]), float(needed[first].max()))
        return rise, float((rise + (needed[second] - rise) / share[second]).max())

    def _release_height(self, thing: str, goal: Float64Array) -> float:
        """Height of the grip site with the thing just on what is below, or the hand just over what is in its way."""
        chart = Map(self._scene, thing, goal[:2])
        resting = resting_surface(chart, (goal + self._held(thing))[:2]) + self._overhang(thing)
        return max(resting - 0.003, float(lowest_grip(chart, chart.others, goal[:2], self._turn)))


def _highest_along(shapes: Boxes, way: Float64Array, room: float) -> Float64Array:
    """[N] the highest top in a square around each point of a way [N, 2]."""
    sides = np.linspace(-room, room, 9)
    square = np.stack(np.meshgrid(sides, sides, indexing="ij"), axis=-1).reshape(-1, 2)
    heights: Float64Array = shapes.tops((way[:, None] + square).reshape(-1, 2)).reshape(len(way), -1).max(axis=1)
    return heights


def _placements(simulator: Any) -> list[list[str]]:
    """The goals of a task as (predicate, thing, target)."""
    goals: list[list[str]] = simulator.parsed_problem["goal_state"]
    for goal in goals:
        if goal[0] not in ("on", "in") or goal[1] not in simulator.objects_dict:
            raise UsageError(
                f"the scripted expert of LIBERO only picks and places, and this task wants ({' '.join(goal)}); "
                "choose others with env.task_ids"
            )
    return goals


def _at(point: Float64Array, height: float) -> Float64Array:
    return np.array([point[0], point[1], height])
