"""Which initial states are evaluated on, and what is said about them."""

import pytest

from vlarl.config.known import SUITES
from vlarl.config.state_choice import (
    UsedStates,
    by_preference,
    choose_states,
    in_ranges,
    state_warnings,
    too_few_unseen,
)
from vlarl.config.suites import SuiteStates
from vlarl.config.training_data import TrainedOn, TrainingData

LIBERO = SuiteStates.of(SUITES["libero_spatial"])
TABLETOP = SuiteStates.of(SUITES["tabletop_goal"])
FIRST, LAST, ALL = tuple(range(30)), tuple(range(30, 50)), tuple(range(50))


@pytest.mark.parametrize(
    ("states", "protocol", "trained", "count", "allowed", "chosen"),
    [
        (LIBERO, "disjoint", FIRST, None, False, LAST),
        (LIBERO, "benchmark", FIRST, None, False, LAST),
        (LIBERO, "benchmark", FIRST, None, True, tuple(range(20))),  # as published: its first ones
        (LIBERO, "benchmark", (), 10, True, tuple(range(10))),
        (LIBERO, "benchmark", ALL, 3, True, (0, 1, 2)),
        (LIBERO, "benchmark", FIRST, 50, True, ALL),
        (LIBERO, "benchmark", FIRST, 50, False, LAST),
        (LIBERO, "benchmark", (), None, False, LAST),  # not known: from the end
        (LIBERO, "benchmark", (), 3, False, (30, 31, 32)),
        (LIBERO, "benchmark", (), 22, False, tuple(range(28, 50))),
        (LIBERO, "benchmark", LAST, None, False, tuple(range(10, 30))),
        (LIBERO, "benchmark", range(30, 45), None, False, tuple(range(15, 30)) + tuple(range(45, 50))),
        (LIBERO, "disjoint", ALL, None, False, ()),
        (LIBERO, "disjoint", ALL, 2, True, (30, 31)),
        (TABLETOP, "benchmark", FIRST, None, False, LAST),
        (TABLETOP, "benchmark", (), 1, False, (30,)),
    ],
)
def test_states_are_chosen(states, protocol, trained, count, allowed, chosen):
    assert choose_states(states, protocol, trained, count, allowed) == chosen


def test_the_best_states_come_first():
    assert by_preference(LIBERO, "benchmark") == LAST + FIRST[::-1]
    assert by_preference(LIBERO, "disjoint") == by_preference(TABLETOP, "benchmark") == LAST


def test_too_few_states_that_were_never_seen():
    def used(count: int, free: tuple[int, ...] = (), by: tuple[str, ...] = ()) -> UsedStates:
        return UsedStates(frozenset(range(count)), (0, 1, 2, 5), free, by)

    assert too_few_unseen(20, used(30), 50, "s", "benchmark") is None
    assert too_few_unseen(None, used(49), 50, "s", "benchmark") is None
    assert too_few_unseen(None, used(50), 50, "s", "benchmark") == (
        "training has used 50 of the 50 initial states that a task of s has under protocol benchmark, in tasks 0 to 2, "
        "5; name the protocol (--protocol benchmark) to include states that were trained on"
    )
    assert too_few_unseen(4, used(17, (3, 4, 6), ("a/b", "c")), 20, "s", "disjoint") == (
        "training of a/b and of c has used 17 of the 20 initial states that a task of s has under protocol disjoint, in "
        "tasks 0 to 2, 5; use 3 or fewer, or choose tasks that were not trained on with --tasks (of s: 3 to 4, 6), or "
        "name the protocol (--protocol disjoint) to include states that were trained on"
    )


def trained(**fields: object) -> TrainingData:
    run = {"by": "train", "suite": "s", "task_ids": (0,), "states": (1, 2)} | fields
    return TrainingData((TrainedOn(**run),))


EPISODES = [(0, 1), (0, 3), (1, 1), (1, 3)]


def test_nothing_is_said_where_nothing_was_trained_on():
    assert state_warnings(TrainingData(), "s", None, EPISODES) == ()
    assert state_warnings(trained(states=(0, 2)), "s", None, EPISODES) == ()
    assert state_warnings(trained(), "other", None, EPISODES) == ()
    assert state_warnings(trained(task_ids=(2,)), "s", None, EPISODES) == ()


def test_what_is_not_known_is_said():
    (warning,) = state_warnings(None, "s", None, EPISODES)
    assert warning == (
        "this checkpoint does not say which initial states it was trained on (it has no valid training_data.json): it "
        "may have been trained on those of this evaluation, and the success rate may be too high."
    )
    (warning,) = state_warnings(trained(states=None), "s", None, EPISODES)
    assert warning.startswith("this checkpoint was trained on demonstrations of s whose initial states are not known")
    (warning,) = state_warnings(trained(suite="prompts", states=None), "prompts", None, EPISODES)
    assert warning.startswith("this checkpoint was trained on rows of data (prompts.path) that are not listed with it")
    (warning,) = state_warnings(TrainingData(unknown=("a/b", "c")), "s", None, EPISODES)
    assert warning.startswith("this checkpoint comes from a/b, c, and it is not known which initial states")


def test_states_that_were_trained_on_are_counted():
    (warning,) = state_warnings(trained(), "s", None, EPISODES)
    assert warning.startswith("1 of 4 episodes begins from initial states that this checkpoint was trained on")
    (warning,) = state_warnings(trained(task_ids=None), "s", None, EPISODES)
    assert warning.startswith("2 of 4 episodes begin")


def test_states_in_words():
    assert (
        in_ranges((7, 0, 2, 1, 3)) == "0 to 3, 7" and in_ranges((4,)) == "4" and in_ranges(range(30, 50)) == "30 to 49"
    )
