"""Scenes: object positions at the start of an episode, and its goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from vlarl.envs.tabletop.geometry import MAX_GOALS, MAX_SLOTS, Float64Array, IndexArray
from vlarl.envs.tabletop.objects import KIND_IDS, KINDS

REACH = 0.25  # objects start within this distance of the table's middle lines
MAX_ATTEMPTS = 400


class GoalType(IntEnum):
    """The predicates of the tabletop world."""

    NONE = 0
    ON = 1  # the object rests on (or in) the target
    OPEN = 2  # the drawer is pulled out
    TURNED_ON = 3  # the stove burns
    NEAR = 4  # the object stands near a point


@dataclass(frozen=True)
class Goal:
    """One predicate over names of a scene."""

    type: GoalType
    obj: str
    target: str = ""  # of ON, and the object that NEAR is measured from
    offset: tuple[float, float] = (0.0, 0.0)  # of NEAR, from the target


@dataclass
class Scene:
    """Named objects being placed on a table; names are kinds, or a kind and a suffix as in `bowl:other`."""

    rng: np.random.Generator
    names: list[str] = field(default_factory=list)
    positions: list[tuple[float, float, float]] = field(default_factory=list)
    supports: list[int] = field(default_factory=list)

    def add(self, name: str, x: float, y: float, z: float = 0.0, support: str = "") -> None:
        """Place an object at this position."""
        self.names.append(name)
        self.positions.append((x, y, z))
        self.supports.append(self.names.index(support) if support else -1)

    def add_near(self, name: str, x: float, y: float, jitter: float, gap: float = 0.006) -> None:
        """Place an object within `jitter` of a point, clear of the objects already there."""
        for attempt in range(MAX_ATTEMPTS):
            reach = jitter * (1 + attempt / 40)  # crowded scenes widen the search rather than fail
            px, py = np.clip((x, y) + self.rng.uniform(-reach, reach, 2), -REACH, REACH)
            if self._is_free(name, px, py, gap):
                return self.add(name, float(px), float(py))
        raise RuntimeError(f"no free position for {name} near ({x:.2f}, {y:.2f}) among {self.names}")

    def add_on(self, name: str, support: str) -> None:
        """Place an object on another one."""
        x, y, z = self.positions[self.names.index(support)]
        kind = KINDS[kind_of(support)]
        self.add(name, x, y + kind.place_offset, z + kind.surface, support)

    def position(self, name: str) -> tuple[float, float]:
        """Position of an object on the table."""
        x, y, _ = self.positions[self.names.index(name)]
        return x, y

    def _is_free(self, name: str, x: float, y: float, gap: float) -> bool:
        radius = KINDS[kind_of(name)].radius
        for other, (ox, oy, _), support in zip(self.names, self.positions, self.supports, strict=True):
            clearance = radius + KINDS[kind_of(other)].radius + gap
            if support < 0 and (x - ox) ** 2 + (y - oy) ** 2 < clearance**2:
                return False
        return True


@dataclass(frozen=True)
class InitialState:
    """A scene and its goals as arrays over slots."""

    kind: IndexArray  # [MAX_SLOTS]
    position: Float64Array  # [MAX_SLOTS, 3]
    support: IndexArray  # [MAX_SLOTS] slot it rests on, -1 the table
    goal_type: IndexArray  # [MAX_GOALS]
    goal_object: IndexArray  # [MAX_GOALS] slot
    goal_target: IndexArray  # [MAX_GOALS] slot
    goal_point: Float64Array  # [MAX_GOALS, 2]


def kind_of(name: str) -> str:
    """The kind of a named object."""
    return name.partition(":")[0]


def compile_scene(scene: Scene, goals: Sequence[Goal]) -> InitialState:
    """Turn names into slots."""
    kind = np.zeros(MAX_SLOTS, dtype=np.intp)
    position = np.zeros((MAX_SLOTS, 3))
    support = np.full(MAX_SLOTS, -1, dtype=np.intp)
    count = len(scene.names)
    kind[:count] = [KIND_IDS[kind_of(name)] for name in scene.names]
    position[:count] = scene.positions
    support[:count] = scene.supports
    goal_type, goal_object, goal_target = (np.zeros(MAX_GOALS, dtype=np.intp) for _ in range(3))
    goal_point = np.zeros((MAX_GOALS, 2))
    for g, goal in enumerate(goals):
        goal_type[g] = goal.type
        goal_object[g] = scene.names.index(goal.obj)
        if goal.target:
            goal_target[g] = scene.names.index(goal.target)
            goal_point[g] = np.add(scene.position(goal.target), goal.offset)
    return InitialState(kind, position, support, goal_type, goal_object, goal_target, goal_point)
