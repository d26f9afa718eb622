"""What is due after each iteration, by hand."""

import itertools

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
    plan = schedule(checkpoint={"interval": interval})
    assert [i for i in range(1, 7) if plan.checkpoint_due(i, saved)] == expected


def test_environment_steps_end_a_run_and_say_how_long_it_is():
    plan = schedule(run={"iterations": None, "total_env_steps": 1000})
    state = TrainerState(iteration=4, env_steps=400)
    assert not plan.finished(state) and plan.total_iterations(state) == 10
    assert list(itertools.islice(plan.iterations_left(state), 3)) == [5, 6, 7]
    assert plan.finished(TrainerState(iteration=9, env_steps=1000))


def test_iterations_end_a_run():
    plan = schedule(run={"iterations": 3})
    assert list(plan.iterations_left(TrainerState(iteration=1))) == [2, 3]
    assert [plan.finished(TrainerState(iteration=i)) for i in (2, 3)] == [False, True]
