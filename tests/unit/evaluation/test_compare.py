import pytest
from fakes.eval_records import record

from vlarl.errors import UsageError
from vlarl.evaluation.compare import compare

A = {(0, 30): True, (0, 31): False, (0, 32): False, (1, 30): False, (1, 31): True, (1, 32): False}


def test_episodes_are_paired_and_counted() -> None:
    b = {(1, 31): True, (1, 30): True, (0, 30): False, (0, 31): True, (0, 32): False, (1, 32): True}
    comparison = compare(record(A), record(b))
    assert (comparison.only_a, comparison.only_b) == (1, 3)
    assert comparison.p_value == pytest.approx(2 * (1 + 4) / 16)
    assert comparison.in_words() == (
        "B wins 3, A wins 1 of 4 episodes on which they differ (6 compared): p = 0.6250, that may be chance."
    )
    content = comparison.to_json()
    assert [content[name] for name in ("both_won", "only_a_won", "only_b_won", "neither_won")] == [1, 1, 3, 1]
    assert [(t["task_id"], t["a"]["won"], t["b"]["won"]) for t in content["tasks"]] == [(0, 1, 1), (1, 1, 3)]
    assert (content["a"]["rate"], content["b"]["rate"], content["unpaired_a"]) == (2 / 6, 4 / 6, [])


def test_the_better_one_is_named_where_the_difference_is_more_than_chance() -> None:
    a = {(0, state): state < 23 for state in range(50)}
    b = {(0, state): 23 <= state < 27 for state in range(50)}
    sentence = compare(record(a), record(b)).in_words()
    assert sentence == "A wins 23, B wins 4 of 27 episodes on which they differ (50 compared): p = 0.0003, A is better."
    assert compare(record(b), record(a)).in_words().endswith("B is better.")
    huge = compare(record({(0, s): True for s in range(40)}), record({(0, s): False for s in range(40)}))
    assert "p = 1.8e-12" in huge.in_words()
    assert compare(record(a), record(a)).in_words() == "A and B had the same outcome on all 50 episodes."


def test_episodes_that_crashed_or_are_missing_are_left_out_and_named() -> None:
    b = {**A, (0, 30): None, (2, 30): True}
    del b[(1, 32)]
    comparison = compare(record(A), record(b))
    assert len(comparison.a.episodes) == len(comparison.b.episodes) == 4
    assert comparison.unpaired_a == (
        "tabletop_spatial-t00-s030-0000000000000007",
        "tabletop_spatial-t01-s032-0000000000000007",
    )
    assert comparison.unpaired_b == ("tabletop_spatial-t02-s030-0000000000000007",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suite", "libero_goal"),
        ("protocol", "disjoint"),
        ("temperature", 0.5),
        ("max_steps", 64),
        ("gym", {"env": "x-v0"}),
    ],
)
def test_unlike_evaluations_are_not_compared(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{name} is .* in A and .* in B"):
        compare(record(A), record(A, **{name: value}))


def test_without_an_episode_in_common_there_is_nothing_to_compare() -> None:
    with pytest.raises(UsageError, match=r"no episode in common \(seeds 0 and 3"):
        compare(record(A), record({(0, 40): True}, seed=3))
