"""Tabletop kinematics, tasks and the scripted expert: known results."""

from dataclasses import replace

import numpy as np
import pytest

from vlarl.envs.base import ExpertFlaws
from vlarl.envs.tabletop import geometry as geo
from vlarl.envs.tabletop.expert import IMPERFECT, PERFECT, ScriptedExpert
from vlarl.envs.tabletop.objects import GRIP, KIND_IDS, RADIUS, Grip
from vlarl.envs.tabletop.scenes import GoalType
from vlarl.envs.tabletop.tasks import FIRST_FRESH_STATE, NUM_FIXED_STATES, SUITES, initial_state
from vlarl.envs.tabletop.world import NOTHING, TabletopWorld

OPEN, CLOSE = -1.0, 1.0
ROW = np.array([0])


def world_with(suite: str = "tabletop_object", task_id: int = 7, index: int = 0) -> TabletopWorld:
    world = TabletopWorld(1)
    world.reset(0, initial_state(suite, task_id, index))
    return world


def act(world: TabletopWorld, gripper: float, motion: tuple[float, float, float] = (0, 0, 0), times: int = 1) -> None:
    for _ in range(times):
        world.step(ROW, np.array([[*motion, 0, 0, 0, gripper]], dtype=np.float32))


def go_to(world: TabletopWorld, point: np.ndarray, gripper: float) -> None:
    for _ in range(30):
        gap = (point - world.eef[0]) / geo.STEP_LENGTH
        act(world, gripper, tuple(np.clip(gap, -1, 1)))
    np.testing.assert_allclose(world.eef[0], np.clip(point, geo.EEF_LOW, geo.EEF_HIGH), atol=1e-6)


def grasp_point(world: TabletopWorld) -> np.ndarray:
    return world.grasp_points(ROW, world.goal_object[:, 0])[0]


def run_expert(suite: str, flaws: ExpertFlaws, states: range) -> tuple[np.ndarray, np.ndarray]:
    """Success [tasks, states] and lengths of the expert on a suite."""
    num_tasks, max_steps = len(SUITES[suite].tasks), SUITES[suite].max_steps
    world = TabletopWorld(num_tasks * len(states))
    expert = ScriptedExpert(world, flaws)
    for row in range(world.num_envs):
        world.reset(row, initial_state(suite, row // len(states), states[row % len(states)]))
        expert.reset(row, seed=row)
    lengths = np.full(world.num_envs, max_steps)
    live = np.arange(world.num_envs)
    for step in range(max_steps):
        world.step(live, expert.shake(live, expert.act(live)))
        done = world.succeeded(live)
        lengths[live[done]] = step + 1
        live = live[~done]
        if not len(live):
            break
    success = np.ones(world.num_envs, dtype=bool)
    success[live] = False
    return success.reshape(num_tasks, -1), lengths.reshape(num_tasks, -1)


def test_an_action_of_one_moves_five_centimetres_and_stays_in_the_workspace():
    world = world_with()
    act(world, OPEN, (1, -1, 0.5))
    np.testing.assert_allclose(world.eef[0], geo.EEF_HOME + [0.05, -0.05, 0.025])
    act(world, OPEN, (5, 5, 5), times=20)
    np.testing.assert_allclose(world.eef[0], geo.EEF_HIGH)


@pytest.mark.parametrize(
    ("offset", "taken"),
    [
        ((0.0, 0.0, 0.0), True),
        ((geo.GRASP_RADIUS * 0.9, 0.0, 0.0), True),
        ((geo.GRASP_RADIUS * 1.1, 0.0, 0.0), False),
        ((0.0, -geo.GRASP_RADIUS * 1.1, 0.0), False),
        ((0.0, 0.0, geo.GRASP_HEIGHT_TOLERANCE * 0.9), True),
        ((0.0, 0.0, geo.GRASP_HEIGHT_TOLERANCE * 1.1), False),
    ],
)
def test_closing_takes_hold_only_within_the_grasp_radius_and_low_enough(offset, taken):
    world = world_with()
    go_to(world, grasp_point(world) + offset, OPEN)
    act(world, CLOSE, times=2)
    assert (world.held[0] == world.goal_object[0, 0]) == taken
    assert (world.proprio(ROW)[0, 6] > 0) == taken  # proprio shows whether something is between the fingers


def test_what_is_held_follows_and_falls_where_it_is_let_go():
    world = world_with()
    obj = world.goal_object[0, 0]
    go_to(world, grasp_point(world), OPEN)
    act(world, CLOSE, times=2)
    act(world, CLOSE, (0, 0, 1), times=2)
    act(world, CLOSE, (-0.5, 0, 0))
    here = world.eef[0].copy()
    act(world, OPEN)
    assert world.held[0] == obj, "one opening step is not enough to lose an object"
    act(world, OPEN)
    assert world.held[0] == NOTHING
    np.testing.assert_allclose(world.position[0, obj], [here[0], here[1], 0.0], atol=1e-9)
    assert not world.succeeded(ROW)[0]


@pytest.mark.parametrize(("miss", "lands"), [(0.0, True), (0.055, True), (0.065, False)])
def test_an_object_lands_in_the_basket_only_within_its_place_radius(miss, lands):
    world = world_with()
    target = world.place_points(ROW, world.goal_target[:, 0])[0]
    go_to(world, grasp_point(world), OPEN)
    act(world, CLOSE, times=2)
    go_to(world, target + [miss, 0, 0.15], CLOSE)
    act(world, OPEN, times=2)
    assert world.succeeded(ROW)[0] == lands


def test_the_knob_turns_the_stove_on_and_nothing_is_held():
    world = world_with("tabletop_goal", task_id=3)
    go_to(world, grasp_point(world), OPEN)
    assert not world.stove_on[0]
    act(world, CLOSE, times=2)
    assert world.stove_on[0] and world.held[0] == NOTHING and world.succeeded(ROW)[0]


def test_a_drawer_moves_only_along_its_rail_and_takes_its_contents_with_it():
    world = world_with("tabletop_long", task_id=4)
    drawer = int(np.flatnonzero(world.kind[0] == KIND_IDS["drawer"])[0])
    start = world.position[0, drawer].copy()
    go_to(world, world.grasp_points(ROW, np.array([drawer]))[0], OPEN)
    act(world, CLOSE, times=2)
    act(world, CLOSE, (0.3, -1, 0))
    assert world.position[0, drawer, 0] == start[0] and world.position[0, drawer, 2] == start[2]
    assert not world.goals_met(ROW)[0, 0]
    act(world, CLOSE, (0, -1, 0), times=1)
    assert world.goals_met(ROW)[0, 0]
    bowl = int(world.goal_object[0, 1])
    world.support[0, bowl] = drawer
    before = world.position[0, bowl, 1]
    moved = -world.position[0, drawer, 1]
    act(world, CLOSE, (0, 1, 0))
    moved += world.position[0, drawer, 1]
    assert moved > 0.02
    np.testing.assert_allclose(world.position[0, bowl, 1] - before, moved)


def test_a_low_gripper_pushes_the_plate_and_a_high_one_does_not():
    for height, pushed in ((0.02, True), (0.08, False)):
        world = world_with("tabletop_goal", task_id=2)
        plate = int(world.goal_object[0, 0])
        before = world.position[0, plate].copy()
        go_to(world, before + [-0.08, 0, 0.1], CLOSE)
        go_to(world, before + [-0.08, 0, height], CLOSE)
        act(world, CLOSE, (1, 0, 0), times=2)
        shift = world.position[0, plate] - before
        assert (shift[0] > 0.03) == pushed and shift[1] == 0


def test_progress_is_one_exactly_at_success_and_grows_on_the_way():
    world = world_with()
    start = world.progress(ROW)[0]
    go_to(world, grasp_point(world), OPEN)
    reached = world.progress(ROW)[0]
    act(world, CLOSE, times=2)
    held = world.progress(ROW)[0]
    go_to(world, world.place_points(ROW, world.goal_target[:, 0])[0] + [0, 0, 0.1], CLOSE)
    carried = world.progress(ROW)[0]
    act(world, OPEN, times=2)
    assert 0 < start < reached < held < carried < world.progress(ROW)[0] == 1.0


@pytest.mark.parametrize("suite", SUITES)
def test_initial_states_are_fixed_different_from_each_other_and_clear_of_overlaps(suite):
    for task_id in range(10):
        seen = set()
        for index in (*range(NUM_FIXED_STATES), *range(FIRST_FRESH_STATE, FIRST_FRESH_STATE + 20)):
            state = initial_state(suite, task_id, index)
            seen.add(state.position.tobytes())
            slots = np.flatnonzero((GRIP[state.kind] == Grip.CARRY) & (state.support == NOTHING))
            assert np.abs(state.position[slots, :2]).max(initial=0.0) <= 0.26
            for a in slots:
                for b in slots[slots > a]:
                    apart = np.hypot(*(state.position[a, :2] - state.position[b, :2]))
                    assert apart >= RADIUS[state.kind[a]] + RADIUS[state.kind[b]]
        assert len(seen) == NUM_FIXED_STATES + 20
        assert initial_state(suite, task_id, 1003).position.tobytes() in seen


@pytest.mark.parametrize("suite", SUITES)
def test_no_task_starts_solved_and_every_sentence_is_its_own(suite):
    assert len({task.instruction for task in SUITES[suite].tasks}) == 10
    for task_id in range(10):
        for index in range(NUM_FIXED_STATES):
            assert not world_with(suite, task_id, index).succeeded(ROW)[0]


def test_states_that_do_not_exist_are_refused():
    for bad in (-1, NUM_FIXED_STATES, FIRST_FRESH_STATE - 1):
        with pytest.raises(ValueError, match="does not exist"):
            initial_state("tabletop_goal", 0, bad)
    with pytest.raises(ValueError, match="unknown tabletop suite"):
        initial_state("tabletop_golf", 0, 0)


@pytest.mark.parametrize("suite", SUITES)
def test_the_expert_solves_the_suites_with_time_to_spare(suite):
    success, lengths = run_expert(suite, PERFECT, range(NUM_FIXED_STATES))
    assert success.mean() >= 0.98
    assert lengths.max() <= 0.8 * SUITES[suite].max_steps


@pytest.mark.parametrize("suite", SUITES)
def test_a_shaky_expert_recovers(suite):
    success, _ = run_expert(suite, ExpertFlaws(action_noise=0.12), range(10))
    assert success.mean() >= 0.98


@pytest.mark.parametrize("flaw", [ExpertFlaws(close_high=1.0), ExpertFlaws(release_early=1.0)])
def test_a_flaw_is_clear_cut(flaw):
    """Closing high or letting go early never succeeds, where the task allows it."""
    for suite in ("tabletop_spatial", "tabletop_object"):
        success, _ = run_expert(suite, replace(flaw, action_noise=0.12), range(NUM_FIXED_STATES))
        assert not success.any()


@pytest.mark.parametrize("suite", SUITES)
def test_about_four_in_ten_flawed_demonstrations_succeed(suite):
    success, _ = run_expert(suite, IMPERFECT, range(NUM_FIXED_STATES))
    assert 0.3 <= success.mean() <= 0.5


def test_goal_types_cover_the_skills_of_the_goal_suite():
    types = {initial_state("tabletop_goal", task_id, 0).goal_type[0] for task_id in range(10)}
    assert types == {GoalType.ON, GoalType.OPEN, GoalType.TURNED_ON, GoalType.NEAR}
