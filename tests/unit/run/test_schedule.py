"""What is due after each iteration, by hand."""

import pytest

from vlarl.config.schema import Config
from vlarl.run.schedule import Schedule
from vlarl.training.state import TrainerState


def schedule(**sections) -> Schedule:
    return Schedule(Config.model_validate(sections))


def due(question, iterations: int = 6) -> list[int]:
    """The iterations after which it is due."""
    return [i for i in range(1, iterations + 1) if question(TrainerState(iteration=i))]


def test_updates_are_due_for_every_so_many_rollouts_and_at_the_end():
    assert due(schedule(run={"iterations": 5}, optim={"rollouts_per_update": 2}).update_due, 5) == [2, 4, 5]
    assert due(schedule(run={"iterations": 3}).update_due, 3) == [1, 2, 3]


def test_evaluations_are_due_at_their_interval_and_at_the_end():
    assert due(schedule(run={"iterations": 5}, eval={"interval": 2}).evaluation_due, 5) == [2, 4, 5]
    assert due(schedule(run={"iterations": 5}, eval={"interval": 0}).evaluation_due, 5) == [5]


def test_videos_are_recorded_in_the_first_and_in_the_last_evaluation():
    videos = schedule(run={"iterations": 4}, eval={"videos": 3}).num_videos
    assert [videos(TrainerState(iteration=i)) for i in range(5)] == [3, 0, 0, 0, 3]


@pytest.mark.parametrize(("interval", "saved", "expected"), [(5, 0, [5, 6]), (5, 5, []), (2, 3, [4, 5, 6]), (0, 0, [])])
def test_a_checkpoint_is_due_once_its_interval_has_passed(interval, saved, expected):
    """Also where the iteration itself could not be saved, as rollouts were waiting for their update."""
    plan, newest = schedule(checkpoint={"interval": interval}), TrainerState(iteration=saved)
    assert due(lambda state: plan.checkpoint_due(state, newest)) == expected


def test_intervals_may_be_counted_in_environment_steps():
    """Due after the iteration that passes a multiple, once, however many it passes."""
    evaluated = schedule(run={"iterations": 9}, eval={"interval_steps": 100, "interval": 1}).evaluation_due
    steps = [0, 60, 100, 120, 450, 499, 500]
    states = [
        TrainerState(iteration=i, env_steps=steps[i], rollout_steps=steps[i] - steps[i - 1])
        for i in range(1, len(steps))
    ]
    assert [state.env_steps for state in states if evaluated(state)] == [100, 450, 500]
    assert evaluated(TrainerState(iteration=9, env_steps=501, rollout_steps=1)), "and at the end"
    saves = schedule(checkpoint={"interval_steps": 100, "interval": 1}).checkpoint_due
    assert [state.env_steps for state in states if saves(state, TrainerState(env_steps=120))] == [450, 499, 500]
    assert not saves(TrainerState(iteration=9, env_steps=499), TrainerState(iteration=4, env_steps=450))


def test_environment_steps_end_a_run_and_say_how_long_it_is():
    plan = schedule(run={"iterations": None, "total_env_steps": 1000})
    state = TrainerState(iteration=4, env_steps=400)
    assert not plan.finished(state) and plan.total_iterations(state) == 10
    assert plan.iterations_left(state) is None
    assert plan.finished(TrainerState(iteration=9, env_steps=1000))


def test_iterations_end_a_run():
    plan = schedule(run={"iterations": 3})
    assert plan.iterations_left(TrainerState(iteration=1)) == 2
    assert [plan.finished(TrainerState(iteration=i)) for i in (2, 3)] == [False, True]
