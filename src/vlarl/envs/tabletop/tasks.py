"""The four suites of ten tasks: spatial (which bowl), object (which object), goal (which goal), long (two goals).

An initial state is a function of suite, task and index alone. Indices 0-49 are the fixed states (30 for training, 20
for evaluation); from `FIRST_FRESH_STATE` on every index is a new state, for demonstrations.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from vlarl.envs.base import SuiteSpec, TaskSpec
from vlarl.envs.tabletop.scenes import Goal, GoalType, InitialState, Scene, compile_scene

NUM_FIXED_STATES = 50
NUM_TRAIN_STATES = 30
FIRST_FRESH_STATE = 1000
SHORT_EPISODE = 32
LONG_EPISODE = 64
JITTER = 0.025

SceneBuilder = Callable[[Scene, int], None]


@dataclass(frozen=True)
class TabletopTask:
    """An instruction, its goals and its scene."""

    instruction: str
    goals: tuple[Goal, ...]
    build: SceneBuilder


@dataclass(frozen=True)
class TabletopSuite:
    """Ten tasks and their time limit."""

    name: str
    tasks: tuple[TabletopTask, ...]
    max_steps: int

    @property
    def spec(self) -> SuiteSpec:
        """The suite as the rest of vlarl knows it."""
        tasks = tuple(TaskSpec(i, task.instruction, self.max_steps) for i, task in enumerate(self.tasks))
        train, evaluation = range(NUM_TRAIN_STATES), range(NUM_TRAIN_STATES, NUM_FIXED_STATES)
        states = tuple(evaluation)
        return SuiteSpec(self.name, tasks, train_states=tuple(train), eval_states=states, benchmark_states=states)


def _on(obj: str, target: str) -> Goal:
    return Goal(GoalType.ON, obj, target)


TURN_ON_STOVE = Goal(GoalType.TURNED_ON, "knob")
OPEN_DRAWER = Goal(GoalType.OPEN, "drawer")
PLATE_TO_STOVE = Goal(GoalType.NEAR, "plate", "stove", offset=(0.0, -0.17))


def _add_stove(scene: Scene, x: float, y: float) -> None:
    scene.add_near("stove", x, y, JITTER / 2)
    stove_x, stove_y = scene.position("stove")
    scene.add("knob", stove_x - 0.055, stove_y - 0.085)


def _add_cabinet(scene: Scene, x: float, y: float) -> None:
    scene.add_near("cabinet", x, y, JITTER / 2)
    cabinet_x, cabinet_y = scene.position("cabinet")
    scene.add("drawer", cabinet_x, cabinet_y - 0.06)


# --- spatial: the same bowl on the same plate, but which bowl? -----------------------------------------------------

_BOWL_SPOTS: dict[str, tuple[float, float] | str] = {  # a point, or the object the bowl stands on
    "between the plate and the ramekin": (-0.02, -0.11),
    "next to the ramekin": (-0.15, -0.01),
    "in the center of the table": (0.0, 0.04),
    "on the cookie box": "cookie_box",
    "in the front left corner": (-0.23, -0.23),
    "on the ramekin": "ramekin",
    "next to the cookie box": (0.12, 0.04),
    "on the stove": "stove",
    "next to the plate": (0.11, -0.235),
    "on top of the cabinet": "cabinet",
}
_SPOT_NAMES = tuple(_BOWL_SPOTS)


def _spatial_scene(scene: Scene, task_id: int) -> None:
    scene.add_near("plate", 0.11, -0.11, JITTER / 2)
    scene.add_near("ramekin", -0.15, -0.11, JITTER / 2)
    scene.add_near("cookie_box", 0.23, 0.04, JITTER / 2)
    _add_stove(scene, 0.14, 0.19)
    _add_cabinet(scene, -0.18, 0.19)
    others = [i for i in range(len(_SPOT_NAMES)) if i != task_id]
    chosen = [task_id, *scene.rng.choice(others, size=2, replace=False)]
    for name, spot_id in zip(("bowl", "bowl:second", "bowl:third"), chosen, strict=True):
        spot = _BOWL_SPOTS[_SPOT_NAMES[spot_id]]
        if isinstance(spot, str):
            scene.add_on(name, spot)
        else:
            scene.add_near(name, *spot, JITTER / 2, gap=0.002)


_SPATIAL = tuple(
    TabletopTask(f"pick up the black bowl {spot} and place it on the plate", (_on("bowl", "plate"),), _spatial_scene)
    for spot in _SPOT_NAMES
)

# --- object: one of ten groceries into the basket ---------------------------------------------------------------------

_GROCERIES = {
    "alphabet_soup": "alphabet soup",
    "cream_cheese": "cream cheese",
    "salad_dressing": "salad dressing",
    "bbq_sauce": "bbq sauce",
    "ketchup": "ketchup",
    "tomato_sauce": "tomato sauce",
    "butter": "butter",
    "milk": "milk",
    "pudding": "chocolate pudding",
    "orange_juice": "orange juice",
}
_GROCERY_KINDS = tuple(_GROCERIES)


def _basket_scene(*wanted: str, num_distractors: int) -> SceneBuilder:
    def build(scene: Scene, task_id: int) -> None:
        scene.add_near("basket", 0.15, -0.13, JITTER)
        others = [kind for kind in _GROCERY_KINDS if kind not in wanted]
        distractors = scene.rng.choice(others, size=num_distractors, replace=False)
        for kind in (*wanted, *distractors):
            scene.add_near(str(kind), -0.03, 0.03, 0.19, gap=0.035)

    return build


_OBJECT = tuple(
    TabletopTask(
        f"pick up the {words} and place it in the basket",
        (_on(kind, "basket"),),
        _basket_scene(kind, num_distractors=4),
    )
    for kind, words in _GROCERIES.items()
)

# --- goal: one scene, ten goals in it ---------------------------------------------------------------------------------


def _goal_scene(scene: Scene, task_id: int) -> None:
    _add_stove(scene, 0.17, 0.17)
    _add_cabinet(scene, -0.18, 0.18)
    scene.add_near("rack", 0.23, -0.21, JITTER / 2)
    scene.add_near("plate", 0.03, -0.06, JITTER)
    scene.add_near("bowl", -0.12, -0.04, JITTER)
    scene.add_near("cream_cheese", -0.09, -0.19, JITTER)
    scene.add_near("wine_bottle", -0.22, -0.12, JITTER)


_GOAL = tuple(
    TabletopTask(words, (goal,), _goal_scene)
    for words, goal in {
        "put the bowl on the plate": _on("bowl", "plate"),
        "put the bowl on the stove": _on("bowl", "stove"),
        "push the plate to the front of the stove": PLATE_TO_STOVE,
        "turn on the stove": TURN_ON_STOVE,
        "open the drawer of the cabinet": OPEN_DRAWER,
        "put the wine bottle on top of the cabinet": _on("wine_bottle", "cabinet"),
        "put the cream cheese in the bowl": _on("cream_cheese", "bowl"),
        "put the bowl on top of the cabinet": _on("bowl", "cabinet"),
        "put the wine bottle on the rack": _on("wine_bottle", "rack"),
        "put the cream cheese on the plate": _on("cream_cheese", "plate"),
    }.items()
)

# --- long: two goals in a row -----------------------------------------------------------------------------------------


def _stove_scene(scene: Scene, task_id: int) -> None:
    _add_stove(scene, 0.15, 0.15)
    scene.add_near("moka_pot", -0.1, -0.02, 2 * JITTER)
    scene.add_near("white_mug", 0.15, -0.15, JITTER)
    scene.add_near("plate", -0.1, -0.19, JITTER)


def _mug_scene(scene: Scene, task_id: int) -> None:
    scene.add_near("plate:left", -0.18, -0.14, JITTER)
    scene.add_near("plate:right", 0.18, -0.14, JITTER)
    scene.add_near("white_mug", -0.07, 0.11, 2 * JITTER)
    scene.add_near("yellow_mug", 0.1, 0.11, 2 * JITTER)
    scene.add_near("pudding", 0.0, -0.06, JITTER)


def _two_groceries(first: str, second: str) -> TabletopTask:
    words = f"put both the {_GROCERIES[first]} and the {_GROCERIES[second]} in the basket"
    goals = (_on(first, "basket"), _on(second, "basket"))
    return TabletopTask(words, goals, _basket_scene(first, second, num_distractors=3))


_LONG = (
    _two_groceries("milk", "butter"),
    _two_groceries("alphabet_soup", "tomato_sauce"),
    _two_groceries("cream_cheese", "ketchup"),
    TabletopTask(
        "turn on the stove and put the moka pot on it", (TURN_ON_STOVE, _on("moka_pot", "stove")), _stove_scene
    ),
    TabletopTask("open the drawer and put the bowl inside", (OPEN_DRAWER, _on("bowl", "drawer")), _goal_scene),
    TabletopTask(
        "put the white mug on the left plate and the yellow mug on the right plate",
        (_on("white_mug", "plate:left"), _on("yellow_mug", "plate:right")),
        _mug_scene,
    ),
    TabletopTask(
        "put the yellow mug on the left plate and the pudding on the right plate",
        (_on("yellow_mug", "plate:left"), _on("pudding", "plate:right")),
        _mug_scene,
    ),
    TabletopTask(
        "put the bowl on the plate and the cream cheese in the bowl",
        (_on("bowl", "plate"), _on("cream_cheese", "bowl")),
        _goal_scene,
    ),
    TabletopTask(
        "put the wine bottle on the rack and turn on the stove",
        (_on("wine_bottle", "rack"), TURN_ON_STOVE),
        _goal_scene,
    ),
    TabletopTask("open the drawer and put the bowl on the plate", (OPEN_DRAWER, _on("bowl", "plate")), _goal_scene),
)

SUITES: dict[str, TabletopSuite] = {
    "tabletop_spatial": TabletopSuite("tabletop_spatial", _SPATIAL, SHORT_EPISODE),
    "tabletop_object": TabletopSuite("tabletop_object", _OBJECT, SHORT_EPISODE),
    "tabletop_goal": TabletopSuite("tabletop_goal", _GOAL, SHORT_EPISODE),
    "tabletop_long": TabletopSuite("tabletop_long", _LONG, LONG_EPISODE),
}


def get_suite(name: str) -> TabletopSuite:
    """The suite of that name, or an error that lists all names."""
    if name not in SUITES:
        raise ValueError(f"unknown tabletop suite {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name]


def initial_state(suite: str, task_id: int, index: int) -> InitialState:
    """The scene an episode starts from: equal arguments give equal scenes, whatever the seed of the episode."""
    if not 0 <= task_id < len(get_suite(suite).tasks):
        raise ValueError(f"{suite} has tasks 0 to {len(get_suite(suite).tasks) - 1}, not {task_id}")
    if 0 <= index < NUM_FIXED_STATES:
        return _fixed_state(suite, task_id, index)
    if index >= FIRST_FRESH_STATE:
        return _make_state(suite, task_id, index)
    raise ValueError(
        f"initial state {index} does not exist: there are 0 to {NUM_FIXED_STATES - 1}, and {FIRST_FRESH_STATE} onwards"
    )


@cache
def _fixed_state(suite: str, task_id: int, index: int) -> InitialState:
    return _make_state(suite, task_id, index)


def _make_state(suite: str, task_id: int, index: int) -> InitialState:
    rng = np.random.default_rng([zlib.crc32(suite.encode()), task_id, index])
    task = get_suite(suite).tasks[task_id]
    scene = Scene(rng)
    task.build(scene, task_id)
    return compile_scene(scene, task.goals)
