"""A scripted demonstrator over the world's privileged state, and the flaws that make its demonstrations imperfect.

The phase of a row (approach, descend, close, lift and carry, lower, open) follows from the state, so the expert
recovers from any disturbance. A flawed episode follows the same path up to one decision and then makes a mistake:

    aligned above the object: descend           | close the gripper here (`close_high`), act as if it held the object
    carrying to the target:   keep carrying     | open the gripper here (`release_early`), stop

so an imitator gives probability to both, and reinforcement learning can choose between them.
"""

from __future__ import annotations

import numpy as np

from vlarl.envs.base import ExpertFlaws
from vlarl.envs.tabletop import geometry as geo
from vlarl.envs.tabletop.geometry import BoolArray, Float64Array, IndexArray
from vlarl.envs.tabletop.objects import GRASP_HEIGHT, RADIUS
from vlarl.envs.tabletop.scenes import GoalType
from vlarl.envs.tabletop.world import TabletopWorld
from vlarl.types import FloatArray

HOVER = 0.08  # above the grasp: where the gripper aligns, and where a flawed one closes
CARRY_HEIGHT = 0.09  # of the object's base above where it will rest
ALIGNED = 0.014  # horizontal distance that counts as aligned
LOWERED = 0.015
RELEASE_HEIGHT = 0.02  # above the rest height
EARLY_DISTANCE = 0.14  # from the target: where a flawed demonstrator lets go, well outside the place radius
LATEST_DISTANCE = 0.115
EARLY_EXTENSION = 0.03  # of a drawer
BASKET_OFFSET = 0.022  # objects in one basket are placed side by side
OPEN, CLOSE = -1.0, 1.0


PERFECT = ExpertFlaws()
IMPERFECT = ExpertFlaws(close_high=0.2, release_early=0.52, action_noise=0.12)


class SlotExpert:
    """The perfect demonstrator for one row of a world, as an `Expert` of one environment."""

    def __init__(self, world: TabletopWorld, row: int) -> None:
        self._expert, self._row = ScriptedExpert(world), row

    def reset(self) -> None:
        """Begin the episode that the row has just started."""
        self._expert.reset(self._row, seed=0)

    def act(self) -> FloatArray:
        """[7] the next action."""
        action: FloatArray = self._expert.act(np.array([self._row], dtype=np.intp))[0]
        return action


class ScriptedExpert:
    """Acts for rows of a world; with flaws it remembers, for each row, which ones its episode has."""

    def __init__(self, world: TabletopWorld, flaws: ExpertFlaws = PERFECT) -> None:
        self.flaws = flaws
        self._world = world
        self._closes_high = np.zeros(world.num_envs, dtype=np.bool_)
        self._releases_early = np.zeros(world.num_envs, dtype=np.bool_)
        self._flawed_goal = np.zeros(world.num_envs, dtype=np.intp)
        self._believes_held = np.zeros(
            world.num_envs, dtype=np.bool_
        )  # closed on nothing, but acts as if it held the object
        self.finished = np.zeros(world.num_envs, dtype=np.bool_)  # stopped after its mistake
        self._rngs = [np.random.default_rng(0) for _ in range(world.num_envs)]

    def reset(self, row: int, seed: int) -> None:
        """Begin an episode; its seed determines its flaws and noise."""
        rng = np.random.default_rng([seed, 1])
        self._rngs[row] = rng
        self._closes_high[row] = rng.random() < self.flaws.close_high
        self._releases_early[row] = rng.random() < self.flaws.release_early
        num_goals = int((self._world.goal_type[row] != GoalType.NONE).sum())
        self._flawed_goal[row] = rng.integers(num_goals)
        self._believes_held[row] = False
        self.finished[row] = False

    def act(self, rows: IndexArray) -> FloatArray:
        """[n, 7] the actions it intends next, clipped to [-1, 1]."""
        world = self._world
        unmet = ~world.goals_met(rows)
        goal = unmet.argmax(axis=1)
        kind = world.goal_type[rows, goal]
        actions = np.zeros((len(rows), 7))
        actions[:, 6] = OPEN
        flawed = goal == self._flawed_goal[rows]
        high, early = flawed & self._closes_high[rows], flawed & self._releases_early[rows]
        for types, script in (
            ((GoalType.ON, GoalType.OPEN, GoalType.TURNED_ON), self._manipulate),
            ((GoalType.NEAR,), self._push),
        ):
            chosen = np.isin(kind, types) & unmet.any(axis=1) & ~self.finished[rows]
            if chosen.any():
                actions[chosen] = script(rows[chosen], goal[chosen], high[chosen], early[chosen])
        return np.clip(actions, -1.0, 1.0).astype(np.float32)

    def shake(self, rows: IndexArray, actions: FloatArray) -> FloatArray:
        """[n, 7] the intended actions with noise, so that demonstrations contain recoveries."""
        noise = np.stack([self._rngs[row].standard_normal(3) for row in rows]) * self.flaws.action_noise
        return np.clip(actions + np.pad(noise, ((0, 0), (0, 4))), -1.0, 1.0).astype(np.float32)

    def _manipulate(self, rows: IndexArray, goal: IndexArray, high: BoolArray, early: BoolArray) -> Float64Array:
        world = self._world
        kind, obj = world.goal_type[rows, goal], world.goal_object[rows, goal]
        deceived = high & (world.opening[rows] == 0) & (world.held[rows] != obj)
        self._believes_held[rows[deceived]] = True
        self.finished[rows[deceived & (kind == GoalType.TURNED_ON)]] = True  # a knob needs nothing more
        command = self._fetch(rows, world.grasp_points(rows, obj), high)
        holds = (world.held[rows] == obj) | self._believes_held[rows]
        for chosen, script in (
            (holds & (kind != GoalType.OPEN), self._bring),
            (holds & (kind == GoalType.OPEN), self._pull),
        ):
            if chosen.any():
                command[chosen] = script(rows[chosen], goal[chosen], obj[chosen], early[chosen])
        return command

    def _fetch(self, rows: IndexArray, grasp: Float64Array, high: BoolArray) -> Float64Array:
        """Align above the grasp point, descend, close."""
        world = self._world
        gap = grasp - world.eef[rows]
        distance = np.hypot(gap[:, 0], gap[:, 1])
        closing = world.opening[rows] < 1.0
        aligned = distance < np.where(closing, 2 * ALIGNED, ALIGNED)
        height = np.where(aligned & ~high, 0.0, HOVER)
        # Far away the gripper keeps its height: it descends on the object from above, not along the table.
        height = np.maximum(height, np.clip(0.5 * distance, 0.0, HOVER))
        rise = gap[:, 2] + height
        there = aligned & (np.abs(rise) < LOWERED)
        return _command(gap[:, 0], gap[:, 1], rise, np.where(there, CLOSE, OPEN))

    def _bring(self, rows: IndexArray, goal: IndexArray, obj: IndexArray, early: BoolArray) -> Float64Array:
        """Carry to the target, lower, open."""
        world = self._world
        target = self._targets(rows, goal)
        rest = target[:, 2] + GRASP_HEIGHT[world.kind[rows, obj]]
        gap = target - world.eef[rows]
        distance = np.hypot(gap[:, 0], gap[:, 1])
        over = distance < np.where(world.opening[rows] > 0, 2 * ALIGNED, ALIGNED)
        carry = rest + CARRY_HEIGHT
        goal_height = np.where(over, rest + RELEASE_HEIGHT / 2, carry)
        rise = goal_height - world.eef[rows, 2]
        # Lift before carrying: the farther below the carry height, the slower sideways.
        ease = np.where(over, 1.0, np.clip(1.0 - (rise - 0.02) / 0.06, 0.15, 1.0))
        drops = over & (rise > -RELEASE_HEIGHT)
        # Short paths leave no space to lift first: release anyway while still clearly off the target.
        lets_go = early & (distance < EARLY_DISTANCE) & ((np.abs(rise) < 0.03) | (distance < LATEST_DISTANCE))
        # Once begun, the release continues even if noise has moved the hand away.
        lets_go |= early & (world.opening[rows] > 0) & (world.held[rows] == obj)
        command = _command(ease * gap[:, 0], ease * gap[:, 1], rise, np.where(drops, OPEN, CLOSE))
        command[lets_go] = (0, 0, 0, 0, 0, 0, OPEN)
        self._mark_finished(rows, drops | lets_go, world.held[rows] == obj, self._believes_held[rows])
        return command

    def _pull(self, rows: IndexArray, goal: IndexArray, obj: IndexArray, early: BoolArray) -> Float64Array:
        """Pull a drawer until it counts as open."""
        world = self._world
        handle = world.grasp_points(rows, obj)
        pulled_air = self._believes_held[rows] & (world.eef[rows, 1] < handle[:, 1] - geo.DRAWER_TRAVEL)
        lets_go = pulled_air | (early & (world.extension(rows, obj) > EARLY_EXTENSION))
        command = np.zeros((len(rows), 7))
        command[:, 1], command[:, 6] = -1.0, CLOSE
        command[lets_go] = (0, 0, 0, 0, 0, 0, OPEN)
        self._mark_finished(rows, lets_go, world.held[rows] == obj, self._believes_held[rows])
        return command

    def _mark_finished(self, rows: IndexArray, opening: BoolArray, holds: BoolArray, deceived: BoolArray) -> None:
        """A flawed demonstrator is finished once it has opened its gripper."""
        opened = opening & (self._world.opening[rows] >= geo.FINGER_SPEED)
        mistaken = deceived | (self._releases_early[rows] & holds)
        self.finished[rows[opened & mistaken]] = True

    def _targets(self, rows: IndexArray, goal: IndexArray) -> Float64Array:
        world = self._world
        points = world.place_points(rows, world.goal_target[rows, goal])
        shared = (world.goal_target[rows, 0] == world.goal_target[rows, 1]) & (world.goal_type[rows, 1] == GoalType.ON)
        points[:, 0] += np.where(shared, np.where(goal == 0, -BASKET_OFFSET, BASKET_OFFSET), 0.0)
        return points

    def _push(self, rows: IndexArray, goal: IndexArray, high: BoolArray, early: BoolArray) -> Float64Array:
        """Go behind the object, down with closed fingers, and push it to the point."""
        world = self._world
        obj = world.goal_object[rows, goal]
        at = world.position[rows, obj]
        way = world.goal_point[rows, goal] - at[:, :2]
        left = np.hypot(way[:, 0], way[:, 1])
        direction = way / np.maximum(left, 1e-6)[:, None]
        eef = world.eef[rows]
        offset = eef[:, :2] - at[:, :2]
        radius = RADIUS[world.kind[rows, obj]]
        along = (offset * direction).sum(axis=1)
        across = np.abs(offset[:, 0] * direction[:, 1] - offset[:, 1] * direction[:, 0])
        behind = (along < -0.5 * radius) & (across < 0.4 * radius)
        low = eef[:, 2] < geo.PUSH_HEIGHT
        push_height = np.where(high, HOVER, geo.PUSH_HEIGHT - 0.015)
        pushing = behind & (low | (high & (eef[:, 2] < HOVER + LOWERED)))
        start = at[:, :2] - direction * (radius + 0.02)[:, None] - eef[:, :2]
        ready = np.hypot(start[:, 0], start[:, 1]) < 2 * ALIGNED
        rise = np.where(ready | pushing, push_height, HOVER + 0.01) - eef[:, 2]
        going = np.where(pushing[:, None], direction * geo.STEP_LENGTH, start)
        going[low & ~behind & ~ready] *= 0.2  # rise first rather than drag the plate the wrong way
        command = _command(going[:, 0], going[:, 1], rise, np.full(len(rows), CLOSE))
        passed = high & (along > 0)
        stops = (early & pushing & low & (left < EARLY_DISTANCE)) | passed
        command[stops] = (0, 0, 0.5, 0, 0, 0, OPEN)
        self.finished[rows[stops]] = True
        return command


def _command(dx: Float64Array, dy: Float64Array, dz: Float64Array, gripper: Float64Array) -> Float64Array:
    zero = np.zeros_like(dx)
    steps = np.stack([dx, dy, dz], axis=1) / geo.STEP_LENGTH
    # One factor for both horizontal axes, so that long moves are straight lines.
    steps[:, :2] /= np.maximum(np.abs(steps[:, :2]).max(axis=1, keepdims=True), 1.0)
    return np.concatenate([np.clip(steps, -1, 1), np.stack([zero, zero, zero, gripper], axis=1)], axis=1)
