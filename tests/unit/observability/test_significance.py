"""Against published values: Newcombe (1998), Statistics in Medicine 17, table I; Agresti's and others' 2x2 tables."""

import pytest

from vlarl.observability.significance import mcnemar_p_value, wilson_interval


@pytest.mark.parametrize(
    ("won", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(won: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(won, total) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    mirrored = wilson_interval(total - won, total)
    assert mirrored == (pytest.approx(1 - high, abs=5e-5), pytest.approx(1 - low, abs=5e-5))


def test_wilson_at_other_levels_and_at_the_ends() -> None:
    # 90%: z = 1.6449; 5 of 10 is symmetric around a half.
    low, high = wilson_interval(5, 10, confidence=0.90)
    assert (low, high) == (pytest.approx(0.2693, abs=5e-5), pytest.approx(0.7307, abs=5e-5))
    assert wilson_interval(0, 50)[0] == 0.0 and wilson_interval(50, 50)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0), "no episode says nothing"


@pytest.mark.parametrize(("won", "total"), [(3, 2), (-1, 5)])
def test_wilson_refuses_impossible_counts(won: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"{won} successes of {total} episodes"):
        wilson_interval(won, total)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p_value"),
    [
        (86, 150, 3.716e-05),  # Agresti: approval of the prime minister, two surveys
        (121, 59, 4.434e-06),  # the example that statsmodels' documentation is often shown with
        (21, 9, 0.04277),
        (23, 4, 0.000311),
        (5, 0, 2 / 32),
        (0, 10, 2 / 1024),
        (1, 1, 1.0),
        (7, 7, 1.0),
        (0, 0, 1.0),
    ],
)
def test_mcnemar_gives_the_published_p_values(only_a: int, only_b: int, p_value: float) -> None:
    assert mcnemar_p_value(only_a, only_b) == pytest.approx(p_value, rel=2e-3)
    assert mcnemar_p_value(only_b, only_a) == mcnemar_p_value(only_a, only_b)


def test_mcnemar_of_thousands_of_episodes_is_still_a_number() -> None:
    assert 0 < mcnemar_p_value(3000, 2700) < 1e-3
    with pytest.raises(ValueError, match="-1 and 3"):
        mcnemar_p_value(-1, 3)
