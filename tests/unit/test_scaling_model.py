"""benchmarks/scaling_model.py against cases that can be computed on paper, and its command."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from scaling_model import Loop, episode_lengths, forecast, ring_seconds  # noqa: E402

ALONE = Loop(
    env_workers=1,
    slots=1,
    decisions=100,
    episode=10,
    env_chunk_s=0.1,
    engine_fixed_s=0.04,
    engine_row_s=0.01,
    update_s=0.02,
)


def varied(**changes) -> Loop:
    return Loop(**{**vars(ALONE), **changes})


def test_one_of_each_works_one_after_the_other():
    result = forecast(varied(reset_s=0.5, driver_call_s=0.03, driver_row_s=0.02, batch_s=0.001, sync_fixed_s=0.7))
    assert result.rollout_s == pytest.approx(100 * (0.1 + 0.05 + 0.05) + 10 * 0.5)
    assert result.batch_s == pytest.approx(100 * 0.001)
    assert result.update_s == pytest.approx(100 * 0.02)
    assert result.sync_s == pytest.approx(0.7)
    assert result.iteration_s == pytest.approx(25 + 2.1 + 0.7)
    assert result.rows_per_call == 1


@pytest.mark.parametrize(("update_s", "seconds", "busiest"), [(0.3, 30.0, "learners"), (0.05, 15.0, "environments")])
def test_overlapped_the_longer_half_counts(update_s, seconds, busiest):
    result = forecast(varied(update_s=update_s, max_staleness=1, iterations=10))
    assert result.iteration_s == pytest.approx(seconds)
    assert result.busiest.startswith(busiest)


def test_rollouts_run_ahead_no_further_than_allowed():
    """With a staleness of 1, rollout 2 runs beside update 1, but rollout 3 waits for its end."""
    slow = forecast(varied(update_s=0.3, max_staleness=1, iterations=3))
    assert slow.iteration_s == pytest.approx(30.0)
    in_turn = forecast(varied(update_s=0.3, iterations=3))
    assert in_turn.iteration_s == pytest.approx(45.0)


def test_a_sync_waits_for_a_decision_and_a_decision_for_a_sync():
    """All of the engine's time and all of the syncs lie apart: nothing but them takes time here."""
    result = forecast(
        varied(env_chunk_s=0.0, engine_fixed_s=0.1, engine_row_s=0.0, update_s=0.0, sync_fixed_s=3.0, max_staleness=1)
    )
    assert result.iteration_s == pytest.approx(10.0 + 3.0, rel=0.01)  # the first sync waits for a decision


@pytest.mark.parametrize("engines", [1, 2])
def test_many_environments_fill_the_engines(engines):
    result = forecast(
        varied(env_workers=64, engines=engines, decisions=6400, engine_fixed_s=0.0, update_s=0.0, iterations=2)
    )
    assert result.rollout_s == pytest.approx(6400 * 0.01 / engines, rel=0.1)
    assert result.busiest == "engines"
    assert result.busy["engines"] > 0.9


def test_a_driver_that_is_full_leaves_the_engines_idle():
    result = forecast(varied(env_workers=64, decisions=6400, engine_row_s=0.0, engine_fixed_s=0.0, driver_row_s=0.05))
    assert result.busiest == "driver"
    assert result.rollout_s == pytest.approx(6400 * 0.05, rel=0.01)


def test_work_on_cores_is_slowed_alike():
    free = varied(env_workers=4, decisions=400, engine_fixed_s=0.0, engine_row_s=0.0, update_s=0.0)
    assert forecast(free).rollout_s == pytest.approx(10.0)
    assert forecast(Loop(**{**vars(free), "cores": 2})).rollout_s == pytest.approx(20.0)


def test_busy_cores_slow_each_other_down():
    """One after the other, work takes as long as alone; on both of two cores, half as long again."""
    alone = varied(decisions=100, engine_fixed_s=0.0, engine_row_s=0.0, update_s=0.0, cores=2.0, crowding=1.5)
    assert forecast(alone).rollout_s == pytest.approx(10.0)
    both = Loop(**{**vars(alone), "env_workers": 2, "decisions": 200})
    assert forecast(both).rollout_s == pytest.approx(10.0 * 1.5)
    less = Loop(**{**vars(both), "crowding": 1.0, "cores": 1.6})  # others take 0.4 of a core
    assert forecast(less).rollout_s == pytest.approx(10.0 * 2 / 1.6)


def test_each_further_worker_and_engine_of_a_round_costs_the_driver_a_call():
    """In lock-step each of 100 rounds has four workers and two engines: four more than one of each."""
    loop = varied(env_workers=4, engines=2, decisions=400, lockstep=True, update_s=0.0, driver_call_s=0.03)
    more = forecast(Loop(**{**vars(loop), "driver_more_s": 0.01}))
    assert more.rollout_s - forecast(loop).rollout_s == pytest.approx(100 * 4 * 0.01)


def test_engines_decide_while_staged_weights_are_on_their_way():
    """Decisions take 10 s an iteration, a sync 3 s, of which engines stand still for 0.5 s."""
    loop = varied(env_chunk_s=0.0, engine_fixed_s=0.1, engine_row_s=0.0, update_s=0.0, sync_fixed_s=3.0)
    staged = Loop(**{**vars(loop), "max_staleness": 1, "staged": True, "commit_s": 0.5, "iterations": 10})
    assert forecast(staged).iteration_s == pytest.approx(10.0 + 0.5, rel=0.02)


def test_learners_share_the_decisions_and_the_cores():
    halves = forecast(varied(ranks=2, microbatch=25, learners_on_cores=True, cores=2))
    assert halves.update_s == pytest.approx(1.0)
    one_core = forecast(varied(ranks=2, microbatch=25, learners_on_cores=True, cores=1))
    assert one_core.update_s == pytest.approx(2.0)


def test_learners_take_microbatches_in_turn_and_one_alone_helps_no_other():
    """Minibatches of 50 rows: one microbatch of 64 is the work of one rank; of three of 20, one rank has 20 + 10."""
    whole = forecast(varied(ranks=2, minibatches=2, microbatch=64, step_s=0.3, steps=4))
    assert whole.update_s == pytest.approx(2 * (50 * 0.02 + 2 * 0.3))
    thirds = forecast(varied(ranks=2, minibatches=2, microbatch=20))
    assert thirds.update_s == pytest.approx(2 * 30 * 0.02)


def test_episodes_that_differ_leave_slots_idle_at_the_end():
    """Two slots: episodes of 1 and 9 decisions, then of 9 and 1. In turn each rollout takes as long as its longest."""
    lengths = varied(
        env_workers=2, lengths=(1, 9, 9, 1), episodes=2, engine_fixed_s=0.0, engine_row_s=0.0, update_s=0.0
    )
    result = forecast(lengths)
    assert result.rollout_s == pytest.approx(9 * 0.1)


def test_in_an_asynchronous_run_slots_go_on_without_the_slowest_episode():
    """Two slots, and batches of two episodes, of 1 and of 9 decisions: 0.5 s of both slots. In turn the slot of the
    short one waits for the other, 0.9 s; ahead it begins the next episodes, up to two batches."""
    loop = varied(env_workers=2, lengths=(1, 9), episodes=2, engine_fixed_s=0.0, engine_row_s=0.0, update_s=0.0)
    in_turn = forecast(Loop(**{**vars(loop), "iterations": 9}))
    ahead = forecast(Loop(**{**vars(loop), "iterations": 9, "max_staleness": 1}))
    assert in_turn.iteration_s == pytest.approx(0.9)
    assert 0.5 <= ahead.iteration_s < 0.75


def test_episodes_of_different_length_add_up_to_the_decisions():
    lengths = episode_lengths(varied(decisions=1000, episode_std=0.5), 50, np.random.default_rng(0))
    assert len(lengths) == 50 and sum(lengths) == 1000
    assert 5 < np.std(lengths) < 15  # 0.5 of a mean of 20
    assert set(episode_lengths(varied(decisions=438), 16, np.random.default_rng(0))) == {27, 28}, "16 episodes, not 17"


def test_lockstep_waits_for_the_slowest_worker():
    each = varied(env_workers=8, decisions=800, engine_fixed_s=0.0, engine_row_s=0.0, update_s=0.0, env_std=0.5)
    free, together = forecast(each), forecast(Loop(**{**vars(each), "lockstep": True}))
    assert together.rows_per_call == 8
    assert free.rows_per_call < 2
    assert together.rollout_s > 1.3 * free.rollout_s


def test_the_ring_passes_on_all_but_its_own_part():
    assert ring_seconds(8e9, 4, 1e9) == pytest.approx(6.0)
    assert ring_seconds(8e9, 1, 1e9) == 0.0
    result = forecast(varied(ranks=4, microbatch=5, shard_bytes=4e9, gradient_bytes=1e9, steps=2, ring_bytes_per_s=1e9))
    assert result.update_s == pytest.approx(25 * 0.02 + 5 * 3 * 3.0 + 2 * 2 * 0.75)
    grouped = forecast(varied(ranks=4, microbatch=5, shard_bytes=4e9, shard_ranks=2, ring_bytes_per_s=1e9))
    assert grouped.update_s == pytest.approx(25 * 0.02 + 5 * 3 * 2.0)


def test_the_same_seed_gives_the_same_forecast():
    differing = varied(env_workers=8, decisions=400, env_std=0.3, seed=3)
    assert forecast(differing) == forecast(differing)
    assert forecast(differing) != forecast(Loop(**{**vars(differing), "seed": 4}))


def test_the_command_prints_json():
    command = [sys.executable, "scaling_model.py", "--json", "--decisions", "100", "--slots", "1", "--lockstep"]
    out = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=True, timeout=300).stdout
    assert json.loads(out)["iteration_s"] == pytest.approx(100 * 0.021 + 1.0)
