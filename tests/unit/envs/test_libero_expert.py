"""The scripted expert of LIBERO: its grasps, and whether it solves tasks through the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from vlarl.envs.base import Mistakes
from vlarl.envs.libero.env import LiberoEnv
from vlarl.envs.libero.expert import LiberoExpert, supports
from vlarl.envs.libero.grasping import Boxes, plan_grasp
from vlarl.envs.libero.suites import libero_spec
from vlarl.errors import UsageError
from vlarl.types import FloatArray, Task

ABOVE = np.array([0.0, 0.0, 0.5])
STAY = np.zeros(2)


def boxes(*parts: tuple[tuple[float, float, float], tuple[float, float, float], float]) -> Boxes:
    """Boxes from (centre, half sizes, angle about the vertical)."""
    turns = [np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]]) for _, _, a in parts]
    centres, halves = np.array([part[0] for part in parts]), np.array([part[1] for part in parts])
    return Boxes(centres, np.array(turns), halves)


TABLE = ((0.0, 0.0, -0.05), (1.0, 1.0, 0.05), 0.0)  # its surface is at height 0


class FakeScene:
    """An object and everything else, without a simulator."""

    def __init__(self, obj: Boxes, others: Boxes) -> None:
        self._obj, self._others = obj, others

    def object_boxes(self, name: str) -> Boxes:
        return self._obj

    def others(self, name: str, around: np.ndarray, radius: float) -> Boxes:
        return self._others


def test_tops_are_the_heights_of_the_highest_box():
    shapes = boxes(TABLE, ((0.3, 0.0, 0.1), (0.1, 0.01, 0.1), np.pi / 4))
    points = np.array([[0.3, 0.0], [0.36, 0.06], [0.36, -0.06], [5.0, 0.0]])
    assert shapes.tops(points) == pytest.approx([0.2, 0.2, 0.0, -np.inf], abs=1e-6)


def test_tops_of_a_slanted_box():
    slope = np.array([[1, 0, 0], [0, np.cos(0.5), -np.sin(0.5)], [0, np.sin(0.5), np.cos(0.5)]])
    board = Boxes(np.zeros((1, 3)), slope[None], np.array([[1.0, 1.0, 0.0]]))
    assert board.tops(np.array([[0.0, 0.4]])) == pytest.approx([0.4 * np.tan(0.5)], abs=1e-6)


@pytest.mark.parametrize("degrees", [0, 30, 75, -45])
def test_a_box_is_taken_across_its_narrow_side(degrees):
    # At rest the fingers move along y; this box is long in x, so the wrist must turn by the box's own angle.
    obj = boxes(((0.1, 0.2, 0.03), (0.07, 0.02, 0.03), np.radians(degrees)))
    grasp = plan_grasp(FakeScene(obj, boxes(TABLE)), "box", ABOVE, STAY)
    assert np.degrees(grasp.turn) == pytest.approx(degrees)
    assert grasp.position[:2] == pytest.approx([0.1, 0.2], abs=0.008)
    assert 0.06 - 0.026 < grasp.position[2] < 0.06  # the pads are beside it, the palm is above it


def bowl(radius: float = 0.055) -> Boxes:
    wall = [
        ((radius * np.cos(a), radius * np.sin(a), 0.03), (0.002, 0.014, 0.03), float(a))
        for a in np.linspace(0, 2 * np.pi, 16, endpoint=False)
    ]
    return boxes(*wall, ((0.0, 0.0, 0.003), (0.04, 0.04, 0.003), 0.0))


def test_a_bowl_too_wide_for_the_hand_is_taken_by_its_near_rim():
    grasp = plan_grasp(FakeScene(bowl(), boxes(TABLE)), "bowl", np.array([0.0, -0.3, 0.4]), STAY)
    assert grasp.position[:2] == pytest.approx([0.0, -0.055], abs=0.008)
    assert grasp.turn == 0


def test_a_wall_at_the_near_rim_makes_it_choose_another_place():
    wall = ((0.0, -0.1, 0.1), (0.3, 0.02, 0.1), 0.0)
    grasp = plan_grasp(FakeScene(bowl(), boxes(TABLE, wall)), "bowl", np.array([0.0, -0.3, 0.4]), STAY)
    assert np.linalg.norm(grasp.position[:2]) == pytest.approx(0.055, abs=0.008)
    assert grasp.position[1] > 0


def test_a_wall_at_the_place_makes_it_take_the_bowl_by_the_far_rim():
    wall = ((0.0, 0.3, 0.1), (0.3, 0.02, 0.1), 0.0)
    scene, gripper = FakeScene(bowl(), boxes(TABLE, wall)), np.array([0.0, 0.2, 0.4])
    assert plan_grasp(scene, "bowl", gripper, STAY).position[1] > 0.04
    assert plan_grasp(scene, "bowl", gripper, np.array([0.0, 0.2])).position[1] < 0.02


def test_a_grasp_that_has_failed_is_not_repeated():
    scene, gripper = FakeScene(bowl(), boxes(TABLE)), np.array([0.0, -0.3, 0.4])
    first = plan_grasp(scene, "bowl", gripper, STAY)
    second = plan_grasp(scene, "bowl", gripper, STAY, [first])
    third = plan_grasp(scene, "bowl", gripper, STAY, [first, second])
    for a, b in ((first, second), (first, third), (second, third)):
        assert np.linalg.norm(a.position[:2] - b.position[:2]) > 0.014 or abs(a.turn - b.turn) > np.radians(19)


def test_nothing_is_taken_where_the_hand_does_not_fit():
    obj = boxes(((0.0, 0.0, 0.03), (0.02, 0.02, 0.03), 0.0))
    shaft = [((x, y, 0.2), (0.03, 0.03, 0.2), 0.0) for x in (-0.06, 0, 0.06) for y in (-0.06, 0, 0.06) if x or y]
    assert plan_grasp(FakeScene(obj, boxes(TABLE, *shaft)), "box", ABOVE, STAY) is None


def test_supports_names_what_only_needs_picking_and_placing():
    assert all(supports(suite, task) for suite in ("libero_spatial", "libero_object") for task in range(10))
    assert supports("libero_goal", 1) and not supports("libero_goal", 7)  # a bowl on the stove; turn the stove on
    assert not supports("libero_90", 0) and not supports("tabletop_spatial", 0) and not supports("libero_spatial", 10)


@pytest.fixture(scope="module")
def spatial(libero_assets: Path) -> Iterator[LiberoEnv]:
    env = LiberoEnv(libero_spec("libero_spatial", None), libero_assets, ("agent",), 64, False)
    yield env
    env.close()


def play(
    env: LiberoEnv,
    task: Task,
    limit: int,
    change: Callable[[FloatArray, int], FloatArray] = lambda action, step: action,
) -> tuple[bool, np.ndarray]:
    """Whether the expert succeeds within the limit, and the actions [T, 7] it wanted, whatever `change` made of them."""
    expert = LiberoExpert(env)
    env.reset(task)
    expert.reset()
    actions = []
    for step in range(limit):
        actions.append(expert.act())
        if env.step(change(actions[-1], step)).success:
            return True, np.stack(actions)
    return False, np.stack(actions)


def assert_as_a_policy_acts(actions: np.ndarray) -> None:
    assert actions.dtype == np.float32 and np.abs(actions).max() <= 1
    assert set(np.unique(actions[:, 6])) == {0.0, 1.0} and actions[0, 6] == 1


@pytest.mark.parametrize("task_id", range(10))
def test_it_brings_the_bowl_to_the_plate(spatial, task_id):
    solved, actions = play(spatial, Task("libero_spatial", task_id, 31, seed=0), 220)
    assert solved
    assert_as_a_policy_acts(actions)


def test_a_bowl_is_lifted_out_of_the_ramekin_before_it_is_carried_away(spatial):
    # From this state, a lower lift took the ramekin along, which pushed the plate away until the time was up.
    solved, actions = play(spatial, Task("libero_spatial", 5, 7, seed=0), 120)
    assert solved and len(np.flatnonzero(np.diff(actions[:, 6]) < 0)) == 1


def test_a_bowl_that_slips_is_grasped_elsewhere(spatial):
    # The rim slips out of the first grasp in the drawer; repeating it took more than the 220 steps.
    solved, actions = play(spatial, Task("libero_spatial", 4, 28, seed=0), 190)
    assert solved and len(np.flatnonzero(np.diff(actions[:, 6]) < 0)) > 1


def test_it_goes_back_for_a_bowl_that_slips_out_of_its_hand(spatial):
    def lose_it(action: FloatArray, step: int) -> FloatArray:
        if step == 45:  # it has been lifted: put it back where it was
            simulator = spatial.simulator
            pose = simulator.sim.data.get_joint_qpos("akita_black_bowl_1_joint0")
            simulator.sim.data.set_joint_qpos("akita_black_bowl_1_joint0", [-0.06, 0.05, 0.905, *pose[3:]])
        return action

    solved, actions = play(spatial, Task("libero_spatial", 0, 30, seed=0), 220, lose_it)
    assert solved
    closings = np.flatnonzero(np.diff(actions[:, 6]) < 0)
    assert len(closings) == 2 and closings[0] < 45 < closings[1]


def test_with_the_gripper_the_wrong_way_round_it_fails(spatial):
    def invert(action: FloatArray, step: int) -> FloatArray:
        return np.append(action[:6], 1 - action[6]).astype(np.float32)

    assert not play(spatial, Task("libero_spatial", 0, 30, seed=0), 150, invert)[0]


def fail(env: LiberoEnv, mistakes: Mistakes) -> tuple[LiberoExpert, np.ndarray, list[np.ndarray]]:
    """An episode of task 0 with mistakes, up to the end of the expert: its actions, and where the bowl was."""
    expert = LiberoExpert(env)
    env.reset(Task("libero_spatial", 0, 31, seed=0))
    expert.reset()
    expert.err(mistakes)
    actions, bowl = [], []
    while not expert.finished and len(actions) < 220:
        actions.append(expert.act())
        assert not env.step(actions[-1]).success
        bowl.append(expert._position("akita_black_bowl_1"))
    for _ in range(15):  # it stands still, while the bowl comes to rest
        assert np.abs(expert.act()[:6]).max() < 0.6 and not env.step(expert.act()).success
    return expert, np.stack(actions), [*bowl, expert._position("akita_black_bowl_1")]


def test_a_gripper_that_closes_too_high_leaves_the_bowl_where_it_is(spatial):
    expert, actions, bowl = fail(spatial, Mistakes(closes_high=True, releases_early=True, goal=0))
    assert expert.finished and np.linalg.norm(bowl[-1] - bowl[0]) < 0.01
    closed = np.flatnonzero(actions[:, 6] == 0)
    assert len(closed) > 20 and actions[-1, 6] == 1  # it carried nothing to the plate, and opened there
    over = np.linalg.norm(expert._gripper()[:2] - expert._target_position("plate_1")[:2])
    assert over < 0.09


def test_a_bowl_that_is_released_early_misses_the_plate(spatial):
    expert, actions, bowl = fail(spatial, Mistakes(closes_high=False, releases_early=True, goal=0))
    assert expert.finished and len(actions) < 120
    assert max(position[2] for position in bowl) > bowl[0][2] + 0.03, "it was lifted"
    assert np.linalg.norm((bowl[-1] - expert._target_position("plate_1"))[:2]) > 0.06


def test_the_same_episode_is_played_the_same_way(spatial):
    _, first = play(spatial, Task("libero_spatial", 0, 31, seed=0), 40)
    _, second = play(spatial, Task("libero_spatial", 0, 31, seed=1), 40)
    assert np.array_equal(first, second)


def test_it_puts_one_object_after_another_into_the_basket(libero_assets):
    env = LiberoEnv(libero_spec("libero_10", None), libero_assets, ("agent",), 64, False)
    solved, actions = play(env, Task("libero_10", 0, 5, seed=0), 300)
    env.close()
    assert solved and len(np.flatnonzero(np.diff(actions[:, 6]) < 0)) == 2
    assert_as_a_policy_acts(actions)


def test_a_knob_is_refused_by_its_goal(libero_assets):
    env = LiberoEnv(libero_spec("libero_goal", None), libero_assets, ("agent",), 64, False)
    env.reset(Task("libero_goal", 7, 0, seed=0))
    with pytest.raises(UsageError, match=r"only picks and places, and this task requires \(turnon flat_stove_1\)"):
        LiberoExpert(env).reset()
    env.close()
