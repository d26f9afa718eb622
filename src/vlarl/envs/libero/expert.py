"""A scripted demonstrator of LIBERO's pick-and-place tasks, over the simulator's privileged state.

    unmet goal ── fetch: rise, over the object, down, close ── bring: lift, over the target, lower, open ── repeat

A demonstration that fails on purpose follows the same path up to one decision, and stops after its mistake:

    over the object:         go down       | close the gripper here (closes_high), act as if it held the object
    carrying to the target:  keep carrying | open the gripper here (releases_early)

The script is a generator of waypoints. It reads the scene whenever it plans the next ones, so an object that slipped
is fetched again. Motion is proportional control towards the waypoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vlarl.envs.base import Mistakes
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
"""Tasks that it solved from at least nine initial states of ten. The others have drawers and knobs."""

OPEN, CLOSED = 1.0, 0.0
STEP, TURN = 0.05, 0.5  # metres and radians of a full action in robosuite's OSC_POSE controller
GAIN = 3.0  # the controller lags: commanding more than the remaining distance gets there sooner
AHEAD = 2.0  # steps over which the gripper's motion is extrapolated, against overshooting
HOVER = 0.05  # above a grasp, where the gripper lines up
CLEARANCE = 0.04  # above any obstacle; a bowl that is lifted less can take along the ramekin that it stands in
MARGIN = 0.08  # to either side of the path
TILTED = 0.1  # radians; less is left alone
SLIPPED = 0.03  # metres that an object has moved in the hand
RESTING = 0.01  # metres a second of a finger
EARLY = 0.12  # metres from the target: where a flawed demonstrator lets go
NO_MISTAKES = Mistakes(False, False, 0)


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
    grips: bool = False  # reached only once the fingers rest
    patience: int = 60  # steps after which the script continues regardless


class LiberoExpert:
    """Plays its environment's episode with a policy's actions: deltas, and 1 for an open gripper."""

    def __init__(self, env: LiberoEnv) -> None:
        self._env = env

    def reset(self) -> None:
        """Plan for the episode that the environment has just started; UsageError if its goal is unsupported."""
        self._simulator = self._env.simulator
        self._goals = _placements(self._simulator)
        self._scene = Scene(self._simulator)
        self._turn = 0.0
        self._finished = False
        self._before = self._gripper()
        self.err(NO_MISTAKES)

    def err(self, mistakes: Mistakes) -> None:
        """Make these mistakes in the episode that was planned by `reset`, and stand still after the first."""
        self._mistakes = mistakes
        self._script = self._play()
        self._waypoint = next(self._script)
        self._age = 0

    @property
    def finished(self) -> bool:
        """Whether it stands still for the rest of the episode."""
        return self._finished

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
        move /= max(np.abs(move).max(), 1.0)  # one factor, so that long moves are straight lines
        tilt = self._tilt(self._waypoint.turn)
        turn = tilt / TURN if np.linalg.norm(tilt) > TILTED else np.zeros(3)
        return np.concatenate([move, turn.clip(-1, 1), [self._waypoint.gripper]]).astype(np.float32)

    def _reached(self) -> bool:
        goal, offset = self._waypoint, self._waypoint.position - self._gripper()
        arrived = np.linalg.norm(offset[:2]) < goal.near and abs(offset[2]) < goal.level
        turned = np.linalg.norm(self._tilt(goal.turn)) < 2 * TILTED
        gripped = not goal.grips or (self._age > 3 and self._fingers_rest())
        return bool((arrived and turned and gripped) or self._age >= goal.patience)

    def _play(self) -> Iterator[Waypoint]:
        failed: dict[str, list[Grasp]] = {}  # grasps of an object that did not bring it to its target
        while True:
            unmet = [goal for goal in self._goals if not self._simulator._eval_predicate(goal)]
            goal = unmet[0] if unmet else self._goals[0]
            _, obj, target = goal
            shift = (self._target_position(target) - self._position(obj))[:2]
            tried = failed.setdefault(obj, [])
            grasp = plan_grasp(self._scene, obj, self._gripper(), shift, tried) if unmet else None
            if grasp is None:  # nothing is left to do, or no grasp fits
                yield self._towards(self._gripper(), OPEN, near=0.0, patience=20)
            elif self._mistakes and goal == self._goals[self._mistakes.goal % len(self._goals)]:
                yield from self._fail(obj, target, grasp)
            else:
                yield from self._fetch(obj, grasp)
                yield from self._bring(obj, target)
                tried.append(grasp)

    def _fail(self, obj: str, target: str, grasp: Grasp) -> Iterator[Waypoint]:
        """Close the gripper above the object, or release it on the way, and give up."""
        high = self._mistakes.closes_high
        yield from self._fetch(obj, replace(grasp, position=grasp.position + [0, 0, HOVER * high]))
        held, overhang = self._held(obj), self._overhang(obj)
        goal = self._target_position(target) - held
        rise, hover = self._heights(obj, goal[:2], held[:2], overhang)
        yield self._towards(_at(self._gripper(), rise), CLOSED, near=0.05, level=0.015)
        if high:
            yield self._towards(_at(goal, hover), CLOSED)
            yield self._towards(_at(goal, hover - HOVER), CLOSED, patience=20)
        else:
            way = goal[:2] - self._gripper()[:2]
            length = float(np.linalg.norm(way))
            fraction = max(1 - EARLY / max(length, 1e-6), 0.4)
            on_the_way = self._gripper()[:2] + fraction * way
            yield self._towards(_at(on_the_way, rise + fraction * (hover - rise)), CLOSED, near=0.02)
        yield self._towards(self._gripper(), OPEN, near=0.0, patience=6)
        self._finished = True
        while True:
            yield self._towards(self._gripper(), OPEN, near=0.0)

    def _fetch(self, obj: str, grasp: Grasp) -> Iterator[Waypoint]:
        """Rise, go over the object, down around it, close."""
        rise, hover = self._heights(obj, grasp.position[:2], np.zeros(2), FINGER_TIP)
        if self._gripper()[2] < rise:
            yield self._towards(_at(self._gripper(), rise), OPEN, near=0.05)
        self._turn = grasp.turn
        yield self._towards(_at(grasp.position, max(hover, grasp.position[2] + HOVER)), OPEN)
        yield self._towards(grasp.position, OPEN, level=0.006, patience=20)
        yield self._towards(grasp.position, CLOSED, near=0.05, level=0.05, grips=True, patience=20)

    def _bring(self, obj: str, target: str) -> Iterator[Waypoint]:
        """Lift, carry over the target, lower, open; stops if the object slips."""
        held = self._held(obj)
        rise, hover = self._heights(obj, (self._target_position(target) - held)[:2], held[:2], self._overhang(obj))
        yield self._towards(_at(self._gripper(), rise), CLOSED, near=0.05, level=0.015)
        if np.linalg.norm(self._held(obj) - held) > SLIPPED:
            return
        held = self._held(obj)
        yield self._towards(_at(self._target_position(target) - held, hover), CLOSED)
        if np.linalg.norm(self._held(obj) - held) > SLIPPED:
            return
        goal = self._target_position(target) - self._held(obj)
        yield self._towards(_at(goal, self._release_height(obj, goal)), CLOSED, level=0.006, patience=40)
        yield self._towards(self._gripper(), OPEN, near=0.0, patience=10)  # the hand opens, the object comes to rest

    def _towards(self, position: Float64Array, gripper: float, **until: Any) -> Waypoint:
        return Waypoint(position, self._turn, gripper, **until)

    def _gripper(self) -> Float64Array:
        return np.array(self._simulator.sim.data.site_xpos[self._simulator.robots[0].eef_site_id])

    def _position(self, obj: str) -> Float64Array:
        return np.array(self._simulator.sim.data.body_xpos[self._simulator.obj_body_id[obj]])

    def _target_position(self, target: str) -> Float64Array:
        return np.array(self._simulator.object_states_dict[target].get_geom_state()["pos"])

    def _held(self, obj: str) -> Float64Array:
        """Position [3] of an object relative to the gripper."""
        return self._position(obj) - self._gripper()

    def _overhang(self, obj: str) -> float:
        """How far an object reaches below the grip site."""
        return float(self._gripper()[2] - self._scene.object_boxes(obj).corners()[:, 2].min())

    def _fingers_rest(self) -> bool:
        speeds = self._simulator.sim.data.qvel[self._simulator.robots[0]._ref_gripper_joint_vel_indexes]
        return bool(np.abs(speeds).max() < RESTING)

    def _tilt(self, turn: float) -> Float64Array:
        """Rotation vector [3] from the gripper's orientation to one that points down with this turn."""
        now = self._simulator.sim.data.site_xmat[self._simulator.robots[0].eef_site_id].reshape(3, 3)
        cos, sin = np.cos(turn), np.sin(turn)
        wanted = np.array([[-sin, cos, 0], [cos, sin, 0], [0, 0, -1]])
        rotation: Float64Array = np.cross(now.T, wanted.T).sum(axis=0) / 2
        return rotation

    def _heights(self, obj: str, end: Float64Array, held: Float64Array, overhang: float) -> tuple[float, float]:
        """Heights at both ends of the gripper's straight path to `end` [2] that clear everything.

        What it carries is offset by `held` [2] and reaches down by `overhang`.
        """
        start = self._gripper()[:2]
        length = float(np.linalg.norm(end - start))
        fraction = np.linspace(0, 1, int(length / 0.02) + 2)
        path = start + fraction[:, None] * (end - start)
        others = self._scene.others(obj, (start + end) / 2, length / 2 + 2 * MARGIN)
        needed = CLEARANCE + np.maximum(
            _highest_along(others, path + held, MARGIN) + overhang,
            _highest_along(others, path, PALM_ALONG) - PALM_BOTTOM,
        )
        first, second = fraction <= 0.5, fraction > 0.5
        rise = max(float(self._gripper()[2]), float(needed[first].max()))
        return rise, float((rise + (needed[second] - rise) / fraction[second]).max())

    def _release_height(self, obj: str, goal: Float64Array) -> float:
        """Height of the grip site with the object just resting on what is below, or the hand just above an obstacle."""
        chart = Map(self._scene, obj, goal[:2])
        resting = resting_surface(chart, (goal + self._held(obj))[:2]) + self._overhang(obj)
        return max(resting - 0.003, float(lowest_grip(chart, chart.others, goal[:2], self._turn)))


def _highest_along(shapes: Boxes, path: Float64Array, margin: float) -> Float64Array:
    """[N] the highest top in a square around each point of a path [N, 2]."""
    sides = np.linspace(-margin, margin, 9)
    square = np.stack(np.meshgrid(sides, sides, indexing="ij"), axis=-1).reshape(-1, 2)
    heights: Float64Array = shapes.tops((path[:, None] + square).reshape(-1, 2)).reshape(len(path), -1).max(axis=1)
    return heights


def _placements(simulator: Any) -> list[list[str]]:
    """The goals of a task as (predicate, object, target)."""
    goals: list[list[str]] = simulator.parsed_problem["goal_state"]
    for goal in goals:
        if goal[0] not in ("on", "in") or goal[1] not in simulator.objects_dict:
            raise UsageError(
                f"the scripted expert of LIBERO only picks and places, and this task requires ({' '.join(goal)}); "
                "choose others with env.task_ids"
            )
    return goals


def _at(point: Float64Array, height: float) -> Float64Array:
    return np.array([point[0], point[1], height])
