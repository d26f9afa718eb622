"""What the object stores of a run must hold, computed by hand, and what is said where it does not fit."""

import logging

import pytest

from vlarl.config.source.load import load_config
from vlarl.distributed import store_size
from vlarl.distributed.store_size import (
    Machine,
    RowBytes,
    bytes_needed,
    check_stores,
    default_store_mib,
    rows_at_once,
    steps_at_once,
)
from vlarl.errors import UsageError

BASE = {"rollout.num_groups": 10, "rollout.group_size": 4, "distributed.backend": "ray"}
BUCKETS = {"distributed.sync_bucket_mb": 5}
GB = 10**9


def configured(**changes):
    return load_config("tabletop_grpo", BASE | changes)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 40 * 14),  # 13 chunks of 8 steps are 100 steps; and the last observation
        ({"rollout.oversample": 1.25, "rollout.refill": False}, 13 * 4 * 14),
        ({"optim.rollouts_per_update": 3}, 3 * 40 * 14),
        ({"distributed.asynchronous": True, "distributed.max_staleness": 2}, 3 * 40 * 14),
        (
            {"distributed.asynchronous": True, "distributed.max_staleness": 2, "rollout.oversample": 1.25},
            (2 * 10 + 13) * 4 * 14,  # what is ahead is counted without what is sampled in excess
        ),
    ],
)
def test_rows_that_are_kept_at_once(changes, rows):
    assert rows_at_once(configured(**changes), 6, max_steps=100, num_steps=8) == rows


def test_rows_of_segments():
    config = load_config("tabletop_ppo", {"rollout.num_steps": 60, "distributed.backend": "ray"})
    assert rows_at_once(config, 6, max_steps=100, num_steps=8) == 6 * 9, "8 chunks of 8 steps, and the last observation"


def test_images_are_kept_until_their_iteration_is_recorded():
    config = configured(**BUCKETS, **{"optim.rollouts_per_update": 3})
    assert bytes_needed(config, 300, RowBytes(1000, 0)) == 300_000 + 10_000_000
    assert bytes_needed(config, 300, RowBytes(1000, 50)) == 300_000 + 100 * 50 + 10_000_000


def test_images_of_replaced_groups_are_kept_too():
    refilled = configured(**BUCKETS, **{"rollout.refill": True, "rollout.max_refills": 2})
    assert bytes_needed(refilled, 300, RowBytes(1000, 50)) == 300_000 + 3 * 300 * 50 + 10_000_000


def test_steps_that_are_saved_are_kept_until_their_episode_ends():
    assert steps_at_once(configured(), 6, max_steps=100) == 0
    saving = configured(**BUCKETS, **{"rollout.save": "rlds", "rollout.save_every": 4})
    assert steps_at_once(saving, 6, max_steps=100) == 200, "at most two of six slots"
    assert bytes_needed(saving, 300, RowBytes(1000, 0), saved=200 * 50) == 300_000 + 10_000_000 + 10_000


def test_the_default_is_what_is_needed_as_far_as_memory_allows(monkeypatch):
    config = configured(**BUCKETS)
    monkeypatch.setattr(store_size, "available_memory", lambda: 64 << 30)
    assert default_store_mib(config, 100, 1000, with_images=False) == 2048, "at least"
    assert default_store_mib(config, None, 10**6, with_images=False) == 2048, "the length of episodes is not known"
    large = default_store_mib(config, 4000, 10**6, with_images=False)
    assert large == pytest.approx((4000 * (10**6 + 8192) + 10**7) / 0.8 / 2**20, abs=1)
    more = default_store_mib(config, 4000, 10**6, with_images=False, steps=1000)
    assert more == pytest.approx((4000 * (10**6 + 8192) + 10**9 + 10**7) / 0.8 / 2**20, abs=1)
    assert default_store_mib(config, 10**6, 10**6, with_images=False) == 32 << 10, "half of the free memory"
    assert default_store_mib(configured(**{"distributed.object_store_mb": 300}), 4000, 10**6, False) == 300


def test_what_fits_into_the_stores_is_not_mentioned(caplog):
    check_stores(configured(), 16 * GB, [Machine("one", 0.5, 10 * GB, 0), Machine("other", 0.5, 10 * GB, 0)])
    assert not caplog.records


def test_what_spills_is_logged_with_the_number_that_holds_it(caplog):
    with caplog.at_level(logging.WARNING):
        check_stores(configured(), 16 * GB, [Machine("one", 1.0, 4 * GB, 100 * GB)])
    assert "up to 16.0 GB of observations are kept at once in the object store of one, which has 4.0 GB" in caplog.text
    assert f"distributed.object_store_mb {round(20 * GB / 2**20 + 0.5)} holds all of it" in caplog.text


def test_what_fits_nowhere_is_refused_with_the_number_to_set():
    machines = [Machine("one", 0.25, 10 * GB, 0), Machine("other", 0.75, 10 * GB, 3 * GB)]
    with pytest.raises(UsageError, match=r"object store of other, which has 10.0 GB, and the disk .* has 3.0 GB free"):
        check_stores(configured(), 16 * GB, machines)
    joined = configured(**{"distributed.address": "auto"})
    with pytest.raises(UsageError, match=rf"Set ray start --object-store-memory to {15 * GB // 2**20 + 1 << 20}, "):
        check_stores(joined, 16 * GB, machines)
