"""Dynamic sampling: which groups are kept, how many new ones are requested, and that everything is counted."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from vlarl.config.schema import RolloutConfig
from vlarl.rollout.selection import GroupRule, GroupSelection
from vlarl.types import Trajectory

ALL_WON, ALL_LOST, MIXED = (True,) * 8, (False,) * 8, (True, False) * 4
ONE_LOST = (True,) * 7 + (False,)


def returns_differ(members: Sequence[Trajectory]) -> bool:
    returns = [member.env_return for member in members]
    return max(returns) > min(returns)


@pytest.fixture
def groups(episodes):
    """groups(outcomes, …, first=0): the members of a group for each tuple of outcomes, with indices from `first`."""

    def make(*outcomes, first: int = 0) -> list[Trajectory]:
        return [member for n, won in enumerate(outcomes) for member in episodes(0, won, group=first + n)]

    return make


def kept(selection: GroupSelection) -> list[int]:
    """The indices of the groups that are kept, each of which is whole."""
    groups = [trajectory.task.group for trajectory in selection.kept]
    assert all(groups.count(group) == 8 for group in groups)
    return list(dict.fromkeys(groups))


def select(has_learning_signal=returns_differ, **options) -> GroupSelection:
    config = RolloutConfig(num_groups=3, group_size=8, **options)
    return GroupSelection(config, GroupRule(config, has_learning_signal))


def counts(selection: GroupSelection) -> list[float]:
    names = ("groups_dropped", "groups_surplus", "groups_refilled", "refill_rounds")
    return [selection.metrics()[f"rollout/{name}"] for name in names]


def test_without_dynamic_sampling_every_group_is_kept_and_no_signal_is_looked_for(groups):
    def never(members: Sequence[Trajectory]) -> bool:
        raise AssertionError("called")

    selection = select(never)
    assert selection.add(groups(ALL_WON, MIXED, ALL_LOST)) == 0
    assert kept(selection) == [0, 1, 2] and selection.metrics() == {}


def test_groups_without_a_learning_signal_are_replaced_round_by_round(groups):
    selection = select(refill=True)
    assert selection.add(groups(ALL_WON, MIXED, ALL_LOST)) == 2
    assert selection.num_tried == 3
    assert selection.add(groups(ALL_LOST, MIXED, first=3)) == 1
    assert selection.add(groups(MIXED, first=5)) == 0
    assert kept(selection) == [1, 4, 5]
    assert counts(selection) == [3, 0, 3, 2]


def test_refills_end_with_the_last_round(groups):
    selection = select(refill=True, max_refills=2)
    assert [
        selection.add(groups(ALL_LOST, MIXED, ALL_LOST)),
        selection.add(groups(ALL_LOST, ALL_LOST, first=3)),
    ] == [2, 2]
    assert selection.add(groups(ALL_WON, MIXED, first=5)) == 0, "one is missing still"
    assert kept(selection) == [1, 6] and counts(selection) == [5, 0, 4, 2]


def test_oversampling_keeps_the_first_with_a_signal_and_counts_the_rest(groups):
    selection = select(oversample=2.0)
    assert selection.add(groups(MIXED, ALL_WON, MIXED, ONE_LOST, MIXED, ALL_LOST)) == 0
    assert kept(selection) == [0, 2, 3]
    assert counts(selection) == [2, 1, 0, 0]


def test_too_few_after_oversampling_are_refilled_in_the_same_proportion(groups):
    selection = select(oversample=1.5, refill=True)
    assert selection.add(groups(ALL_WON, ALL_WON, MIXED, ALL_LOST, ALL_LOST)) == 3  # ceil(2 * 1.5)
    assert selection.add(groups(MIXED, MIXED, MIXED, first=5)) == 0
    assert kept(selection) == [2, 5, 6] and counts(selection) == [4, 1, 3, 1]


def test_bounds_are_exclusive_and_apply_without_refilling(groups):
    """1 of 8 and 7 of 8 lie inside 0.1 and 0.9, but not inside 0.125 and 0.875."""
    one_won = (False,) * 7 + (True,)
    wide, narrow = select(accuracy_bounds=(0.1, 0.9)), select(accuracy_bounds=(0.125, 0.875))
    for selection in (wide, narrow):
        assert selection.add(groups(one_won, MIXED, ONE_LOST)) == 0
    assert kept(wide) == [0, 1, 2] and counts(wide) == [0, 0, 0, 0]
    assert kept(narrow) == [1] and counts(narrow) == [2, 0, 0, 0]


def test_an_always_successful_group_is_kept_if_the_algorithm_and_the_bounds_allow_it(groups):
    """With algorithm.verifier_gamma below 1, an earlier success has a higher return."""
    free, bound = select(lambda group: True, refill=True), select(lambda group: True, accuracy_bounds=(0.0, 1.0))
    free.add(groups(ALL_WON, MIXED, ALL_LOST))
    bound.add(groups(ALL_WON, MIXED, ALL_LOST))
    assert kept(free) == [0, 1, 2] and kept(bound) == [1]


def test_a_group_that_crashed_as_a_whole_is_dropped_and_replaced(groups):
    selection = select(refill=True)
    crashed = [replace(member, status="crashed") for member in groups(MIXED, first=2)]
    assert selection.add([*groups(MIXED, MIXED), *crashed]) == 1
    assert counts(selection) == [1, 0, 1, 1] and kept(selection) == [0, 1]


def test_members_that_crashed_or_were_not_scored_are_left_out_of_their_group(groups):
    selection = select()
    first, second, third, *others = groups(MIXED)
    lost = [replace(first, status="crashed"), replace(second, status="reward_failed")]
    assert selection.add([*lost, third, *others]) == 0
    assert selection.kept == [third, *others] and selection.num_tried == 1
