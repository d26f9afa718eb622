"""Kinematics and predicates of the tabletop world, over all environments at once.

There are no forces: the gripper moves as commanded, closing it near an object grasps it, opening it lets the object
drop onto whatever is below. Arrays have the environment first: N environments, M slots, G goals.
"""

from __future__ import annotations

import numpy as np

from vlarl.envs.tabletop import geometry as geo
from vlarl.envs.tabletop.geometry import BoolArray, Float64Array, IndexArray
from vlarl.envs.tabletop.objects import (
    GRASP_HEIGHT,
    GRIP,
    GRIP_WIDTH,
    PLACE_OFFSET,
    PLACE_RADII,
    PUSHABLE,
    RADIUS,
    SURFACE,
    Grip,
)
from vlarl.envs.tabletop.scenes import GoalType, InitialState
from vlarl.types import FloatArray

NOTHING = -1
REACH_SCALE = 0.15  # distance at which a shaping term has lost three quarters of its value


class TabletopWorld:
    """The state of N tables; `rows` are indices of environments throughout."""

    def __init__(self, num_envs: int) -> None:
        n, m, g = num_envs, geo.MAX_SLOTS, geo.MAX_GOALS
        self.num_envs = n
        self.eef = np.tile(geo.EEF_HOME, (n, 1))  # [N, 3] fingertips
        self.rotation = np.zeros((n, 3))
        self.opening = np.ones(n)  # 0 closed, 1 open
        self.held = np.full(n, NOTHING, dtype=np.intp)
        self.stove_on = np.zeros(n, dtype=np.bool_)
        self.kind = np.zeros((n, m), dtype=np.intp)
        self.position = np.zeros((n, m, 3))
        self.start = np.zeros((n, m, 3))  # positions at reset; a drawer's rail begins there
        self.support = np.full((n, m), NOTHING, dtype=np.intp)
        self.goal_type = np.zeros((n, g), dtype=np.intp)
        self.goal_object = np.zeros((n, g), dtype=np.intp)
        self.goal_target = np.zeros((n, g), dtype=np.intp)
        self.goal_point = np.zeros((n, g, 2))

    def reset(self, row: int, state: InitialState) -> None:
        """Put one environment into an initial state, the gripper at home and open."""
        self.eef[row] = geo.EEF_HOME
        self.rotation[row] = 0.0
        self.opening[row] = 1.0
        self.held[row] = NOTHING
        self.stove_on[row] = False
        self.kind[row] = state.kind
        self.position[row] = state.position
        self.start[row] = state.position
        self.support[row] = state.support
        self.goal_type[row] = state.goal_type
        self.goal_object[row] = state.goal_object
        self.goal_target[row] = state.goal_target
        self.goal_point[row] = state.goal_point

    def step(self, rows: IndexArray, actions: FloatArray) -> None:
        """Apply one action [n, 7] to each row."""
        action = np.clip(actions.astype(np.float64), -1.0, 1.0)
        before = self.eef[rows]
        after = np.clip(before + geo.STEP_LENGTH * action[:, :3], geo.EEF_LOW, geo.EEF_HIGH)
        self.eef[rows] = after
        turned = self.rotation[rows] + geo.STEP_ANGLE * action[:, 3:6]
        self.rotation[rows] = np.clip(turned, -geo.MAX_ANGLE, geo.MAX_ANGLE)
        holding = self.held[rows] != NOTHING
        if holding.any():
            self._move_held(rows[holding])
        low = ~holding & (after[:, 2] < geo.PUSH_HEIGHT)
        if low.any():
            self._push(rows[low], before[low])
        was_open = self.opening[rows]
        change = np.where(action[:, 6] > 0, -geo.FINGER_SPEED, geo.FINGER_SPEED)
        now_open = np.clip(was_open + change, 0.0, 1.0)
        self.opening[rows] = now_open
        closes = ~holding & (was_open > 0) & (now_open == 0)
        if closes.any():
            self._grasp(rows[closes])
        opens = (self.held[rows] != NOTHING) & (now_open == 1.0)
        if opens.any():
            self._release(rows[opens])

    def grasp_points(self, rows: IndexArray, slots: IndexArray) -> Float64Array:
        """[n, 3] fingertip positions for grasping an object."""
        points = self.position[rows, slots]
        points[:, 2] += GRASP_HEIGHT[self.kind[rows, slots]]
        return points

    def place_points(self, rows: IndexArray, slots: IndexArray) -> Float64Array:
        """[n, 3] where objects rest on a target."""
        points = self.position[rows, slots]
        kind = self.kind[rows, slots]
        points[:, 1] += PLACE_OFFSET[kind]
        points[:, 2] += np.maximum(SURFACE[kind], 0.0)
        return points

    def extension(self, rows: IndexArray, slots: IndexArray) -> Float64Array:
        """[n] how far a drawer is pulled out."""
        pulled: Float64Array = self.start[rows, slots, 1] - self.position[rows, slots, 1]
        return pulled

    def goals_met(self, rows: IndexArray) -> BoolArray:
        """[n, G] which goals hold now; a goal that a task does not have always holds."""
        met = np.ones((len(rows), geo.MAX_GOALS), dtype=np.bool_)
        for g in range(geo.MAX_GOALS):
            goal, obj = self.goal_type[rows, g], self.goal_object[rows, g]
            free = self.held[rows] != obj
            on = free & (self.support[rows, obj] == self.goal_target[rows, g])
            opened = self.extension(rows, obj) >= geo.DRAWER_OPEN
            offset = self.position[rows, obj, :2] - self.goal_point[rows, g]
            near = free & (np.hypot(offset[:, 0], offset[:, 1]) <= geo.PUSH_TOLERANCE)
            conditions = [goal == GoalType.ON, goal == GoalType.OPEN, goal == GoalType.TURNED_ON, goal == GoalType.NEAR]
            met[:, g] = np.select(conditions, [on, opened, self.stove_on[rows], near], default=True)
        return met

    def succeeded(self, rows: IndexArray) -> BoolArray:
        """[n] whether all goals of a task hold now."""
        return np.asarray(self.goals_met(rows).all(axis=1))

    def progress(self, rows: IndexArray) -> Float64Array:
        """[n] progress of the task from 0 to 1 (all goals met): the potential of the dense reward."""
        met = self.goals_met(rows)
        count = np.maximum((self.goal_type[rows] != GoalType.NONE).sum(axis=1), 1)
        total = np.zeros(len(rows))
        for g in range(geo.MAX_GOALS):
            value = np.where(met[:, g], 1.0, self._goal_progress(rows, g))
            total += np.where(self.goal_type[rows, g] != GoalType.NONE, value, 0.0)
        mean: Float64Array = total / count
        return mean

    def proprio(self, rows: IndexArray) -> FloatArray:
        """[n, 8] gripper position, axis-angle and the two finger positions."""
        fingers = geo.FINGER_TRAVEL * self.finger_opening(rows)
        values = np.concatenate([self.eef[rows], self.rotation[rows], fingers[:, None], -fingers[:, None]], axis=1)
        proprio: FloatArray = values.astype(np.float32)
        return proprio

    def finger_opening(self, rows: IndexArray) -> Float64Array:
        """[n] the visible opening: fingers stop at the object between them."""
        held = self.held[rows]
        width = np.where(held == NOTHING, 0.0, GRIP_WIDTH[self.kind[rows, held]])
        wanted: Float64Array = np.maximum(self.opening[rows], width)
        return wanted

    def _goal_progress(self, rows: IndexArray, g: int) -> Float64Array:
        goal, obj = self.goal_type[rows, g], self.goal_object[rows, g]
        reach = _closeness(self.eef[rows] - self.grasp_points(rows, obj))
        holds = self.held[rows] == obj
        target = self.place_points(rows, self.goal_target[rows, g])
        carried = _closeness((self.eef[rows] - target)[:, :2])
        pulled = np.clip(self.extension(rows, obj) / geo.DRAWER_OPEN, 0.0, 1.0)
        pushed = _closeness(self.position[rows, obj, :2] - self.goal_point[rows, g])
        place = np.where(holds, 0.5 + 0.25 * carried, 0.25 * reach)
        pull = np.where(holds, 0.5, 0.25 * reach) + 0.25 * pulled
        conditions = [goal == GoalType.ON, goal == GoalType.OPEN, goal == GoalType.TURNED_ON]
        return np.select(conditions, [place, pull, 0.5 * reach], default=0.25 * reach + 0.5 * pushed)

    def _move_held(self, rows: IndexArray) -> None:
        slots = self.held[rows]
        kind = self.kind[rows, slots]
        old = self.position[rows, slots]
        new = self.eef[rows] - np.stack([0 * old[:, 0], 0 * old[:, 0], GRASP_HEIGHT[kind]], axis=1)
        slides = GRIP[kind] == Grip.SLIDE
        rail = self.start[rows, slots]
        on_rail = np.clip(new[:, 1], rail[:, 1] - geo.DRAWER_TRAVEL, rail[:, 1])
        new[slides] = np.stack([rail[:, 0], on_rail, rail[:, 2]], axis=1)[slides]
        new[:, 2] = np.maximum(new[:, 2], 0.0)
        self._shift(rows, slots, new - old)
        away = np.linalg.norm(self.eef[rows] - self.grasp_points(rows, slots), axis=1)
        self.held[rows[slides & (away > geo.SLIP_DISTANCE)]] = NOTHING

    def _push(self, rows: IndexArray, before: Float64Array) -> None:
        moved = self.eef[rows] - before
        gap = (self.position[rows] - self.eef[rows, None])[..., :2]  # [n, M, 2] from the fingertips to each object
        reached = PUSHABLE[self.kind[rows]] & (np.hypot(gap[..., 0], gap[..., 1]) < RADIUS[self.kind[rows]])
        ahead = (gap * moved[:, None, :2]).sum(axis=2) > 0
        for n, slot in np.argwhere(reached & ahead):
            row = rows[n : n + 1]
            shift = np.array([[moved[n, 0], moved[n, 1], 0.0]])
            at = self.position[row, slot, :2]
            shift[:, :2] = np.clip(at + shift[:, :2], geo.EEF_LOW[:2], geo.EEF_HIGH[:2]) - at  # stays on the table
            self._shift(row, np.array([slot]), shift)

    def _shift(self, rows: IndexArray, slots: IndexArray, shift: Float64Array) -> None:
        """Move objects, and with them what rests on them."""
        self.position[rows, slots] += shift
        rides = self.support[rows] == slots[:, None]  # [n, M]
        if rides.any():
            second = (self.support[rows][:, :, None] == np.arange(geo.MAX_SLOTS)) & rides[:, None, :]
            self.position[rows] += (rides | second.any(axis=2))[..., None] * shift[:, None]

    def _grasp(self, rows: IndexArray) -> None:
        kind = self.kind[rows]  # [n, M]
        gap = self.eef[rows, None] - self.position[rows]
        distance = np.hypot(gap[..., 0], gap[..., 1])
        low_enough = np.abs(gap[..., 2] - GRASP_HEIGHT[kind]) <= geo.GRASP_HEIGHT_TOLERANCE
        can = (GRIP[kind] != Grip.NONE) & (distance <= geo.GRASP_RADIUS) & low_enough
        slots = np.where(can, distance, np.inf).argmin(axis=1)
        grips = np.where(can.any(axis=1), GRIP[kind[np.arange(len(rows)), slots]], Grip.NONE)
        self.stove_on[rows[grips == Grip.TWIST]] = True
        takes = (grips == Grip.CARRY) | (grips == Grip.SLIDE)
        if takes.any():
            rows, slots, carries = rows[takes], slots[takes], (grips == Grip.CARRY)[takes]
            self.held[rows] = slots
            self.support[rows[carries], slots[carries]] = NOTHING
            self._move_held(rows)  # the fingers centre the object between them

    def _release(self, rows: IndexArray) -> None:
        slots = self.held[rows]
        self.held[rows] = NOTHING
        falls = GRIP[self.kind[rows, slots]] == Grip.CARRY
        rows, slots = rows[falls], slots[falls]
        if not len(rows):
            return
        kind = self.kind[rows]
        centre = self.position[rows].copy()  # [n, M, 3]
        centre[..., 1] += PLACE_OFFSET[kind]
        obj = self.position[rows, slots]
        gap = centre[..., :2] - obj[:, None, :2]
        top = centre[..., 2] + SURFACE[kind]
        shut = (GRIP[kind] == Grip.SLIDE) & (self.start[rows, :, 1] - self.position[rows, :, 1] < geo.DRAWER_OPEN)
        takes = (SURFACE[kind] >= 0) & ~shut & (np.hypot(gap[..., 0], gap[..., 1]) <= PLACE_RADII[kind])
        takes &= (np.arange(geo.MAX_SLOTS) != slots[:, None]) & (self.support[rows] != slots[:, None])
        takes &= top <= obj[:, None, 2] + geo.GRASP_HEIGHT_TOLERANCE
        height = np.where(takes, top, 0.0)
        best = np.where(takes, top, -1.0).argmax(axis=1)
        landed = takes.any(axis=1)
        drop = np.where(landed, height[np.arange(len(rows)), best], 0.0) - obj[:, 2]
        self._shift(rows, slots, np.stack([0 * drop, 0 * drop, drop], axis=1))
        self.support[rows, slots] = np.where(landed, best, NOTHING)


def _closeness(offset: Float64Array) -> Float64Array:
    distance = np.sqrt((offset**2).sum(axis=1))
    closeness: Float64Array = 1.0 - np.tanh(distance / REACH_SCALE)
    return closeness
