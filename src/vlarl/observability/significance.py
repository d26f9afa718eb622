"""Statistics of success counts: Wilson's interval for one policy, McNemar's exact test for two."""

from __future__ import annotations

import math
from statistics import NormalDist

CONFIDENCE = 0.95


def wilson_interval(won: int, total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a success rate, which stays sensible near 0 and 1; all of [0, 1] for no episodes."""
    if not 0 <= won <= total:
        raise ValueError(f"{won} successes of {total} episodes: there can't be fewer than none or more than all")
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate, z_term = won / total, z * z / total
    center = (rate + z_term / 2) / (1 + z_term)
    half = z / (1 + z_term) * math.sqrt(rate * (1 - rate) / total + z_term / (4 * total))
    # At the ends the formula is exact but for rounding, which must not exclude a rate of 0 or 1.
    return (0.0 if won == 0 else center - half), (1.0 if won == total else center + half)


def mcnemar_p_value(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value of McNemar's test: episodes that only A won, and those that only B won.

    If the two were equally good, each of these episodes would be a fair coin. Episodes with equal outcomes don't count.
    """
    if only_a < 0 or only_b < 0:
        raise ValueError(f"{only_a} and {only_b} episodes: counts can't be negative")
    total = only_a + only_b
    tail = sum(math.comb(total, wins) for wins in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / (1 << total))
