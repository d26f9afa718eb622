"""A reward that fails: retried, logged, counted, replaced; and the run ends when it fails too often."""

import logging
import math
from dataclasses import replace

import pytest
import torch

from vlarl.errors import ClusterError, RowsLostError, VlarlError
from vlarl.interrupt import Interrupted
from vlarl.rewards.base import Reward, RewardTimeoutError, RewardUnavailableError, reward_at_end
from vlarl.rewards.combined import CombinedReward
from vlarl.rewards.safe import RewardFailureError, SafeReward, is_device_fault
from vlarl.rollout.statistics import rollout_metrics


class Scripted(Reward):
    """Rewards 1. Episodes in `broken` raise, or return the value there; `heals`: after this many calls they succeed."""

    def __init__(self, broken=(), heals=math.inf, batch_size=1):
        self.broken = dict(broken)
        self.heals = heals
        self.batch_size = batch_size
        self.calls = []
        self.on_cpu = False

    def score_all(self, trajectories):
        self.calls.append([t.task.group for t in trajectories])
        return super().score_all(trajectories)

    def score(self, trajectory):
        result = self.broken.get(trajectory.task.group, 1.0)
        calls = sum(trajectory.task.group in call for call in self.calls)
        if isinstance(result, BaseException):
            if calls <= self.heals and not (self.on_cpu and is_device_fault(result)):
                raise result
            result = 1.0
        return reward_at_end(trajectory, result)

    def move_to_cpu(self):
        moved, self.on_cpu = not self.on_cpu, True
        return moved


@pytest.fixture
def episodes(trajectory):
    return lambda count: [trajectory([[0.5, 0.5]], group=n, seed=n) for n in range(count)]


@pytest.mark.parametrize("num_lost", [1, 5, 8])
def test_episodes_whose_images_were_lost_with_a_machine_are_left_out_and_are_no_failures(episodes, caplog, num_lost):
    """Most of them or all: the reward is not to blame, and the run must not end because of it."""
    lost = RowsLostError("processed observations are lost with the machine that they were made on", "ff")
    reward = SafeReward(Scripted({n: lost for n in range(num_lost)}, batch_size=4))
    scored = reward.score_all(episodes(8))
    assert [t.status for t in scored] == ["crashed"] * num_lost + ["ok"] * (8 - num_lost)
    assert [t.env_return for t in scored[:num_lost]] == [0] * num_lost, (
        "an episode that continues keeps no other reward"
    )
    assert all(t.reward_error is None for t in scored) and [t.env_return for t in scored[num_lost:]] == [1] * (
        8 - num_lost
    )
    assert caplog.text.count("is left out: processed observations are lost") == num_lost


def test_a_healthy_reward_is_left_alone(episodes, caplog):
    inner = Scripted()
    reward = SafeReward(inner)
    assert [t.env_return for t in reward.score_all(episodes(3))] == [1, 1, 1]
    assert inner.calls == [[0], [1], [2]] and not caplog.records
    assert reward.score(episodes(1)[0]).status == "ok"


@pytest.mark.parametrize(("fallback", "status"), [("drop", "reward_failed"), ("zero", "ok")])
def test_a_failure_is_retried_logged_with_its_traceback_counted_and_replaced(episodes, caplog, fallback, status):
    inner = Scripted({2: ZeroDivisionError("no way")})
    reward = SafeReward(inner, retries=2, fallback=fallback)
    scored = reward.score_all(batch := episodes(10))
    assert [t.env_return for t in scored] == [1, 1, 0, *[1] * 7]
    assert [t.status for t in scored] == ["ok", "ok", status, *["ok"] * 7]
    assert scored[2].reward_error == "ZeroDivisionError: no way"
    assert inner.calls.count([2]) == 3 and len(inner.calls) == 12
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert batch[2].task.episode_id in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError and record.exc_info[2] is not None, "the traceback is logged"
    metrics = rollout_metrics(scored, seconds=1.0)
    assert metrics["rollout/reward_failures"] == 1 and metrics["rollout/reward_failure_rate"] == 0.1
    assert metrics["rollout/num_trajectories"] == (10 if fallback == "zero" else 9)
    assert metrics["rollout/mean_return"] == pytest.approx(0.9 if fallback == "zero" else 1.0)
    assert metrics["rollout/num_crashed"] == 0


def test_a_temporary_failure_is_not_counted(episodes):
    scored = SafeReward(Scripted({1: OSError("later")}, heals=2), retries=2).score_all(episodes(2))
    assert [t.env_return for t in scored] == [1, 1] and all(t.reward_error is None for t in scored)


@pytest.mark.parametrize("result", [math.nan, math.inf])
def test_a_result_that_is_not_finite_is_a_failure(episodes, result):
    for batch_size in (1, 4):
        inner = Scripted({1: result}, batch_size=batch_size)
        scored = SafeReward(inner, retries=1).score_all(episodes(4))
        assert [t.status for t in scored] == ["ok", "reward_failed", "ok", "ok"]
        assert "not finite" in scored[1].reward_error
        assert inner.calls.count([1]) == 2
        assert not scored[1].env_return


def test_of_a_batch_only_those_at_fault_are_lost(episodes):
    inner = Scripted({5: ValueError("odd")}, batch_size=4)
    scored = SafeReward(inner, retries=0).score_all(episodes(10))
    assert inner.calls == [[0, 1, 2, 3], [4, 5, 6, 7], [4], [5], [6], [7], [8, 9]]
    assert [t.task.group for t in scored if t.status != "ok"] == [5]


def test_without_a_service_episodes_are_not_scored_one_by_one(episodes):
    down = Scripted({n: RewardUnavailableError("down") for n in (0, 1)}, batch_size=2)
    scored = SafeReward(down, retries=3).score_all(episodes(4))
    assert down.calls == [[0, 1], [2, 3]]
    assert [t.reward_error for t in scored] == ["RewardUnavailableError: down"] * 2 + [None] * 2


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_cluster_that_cannot_continue_is_not_a_fault_of_an_episode(episodes, batch_size):
    full = Scripted({0: ClusterError("the object store is full")}, batch_size=batch_size)
    with pytest.raises(ClusterError, match="object store"):
        SafeReward(full, retries=3, fallback="zero", max_failure_rate=1.0).score_all(episodes(4))
    assert len(full.calls) == 1


def test_a_device_fault_moves_the_reward_to_the_cpu(episodes, caplog):
    inner = Scripted(
        {0: torch.OutOfMemoryError("CUDA out of memory"), 1: RuntimeError("CUDA error: unspecified")}, batch_size=2
    )
    combined = CombinedReward({"inner": inner}, {"inner": 1.0})
    scored = SafeReward(combined, retries=0).score_all(episodes(2))
    assert [t.env_return for t in scored] == [1, 1] and inner.on_cpu
    assert inner.calls == [[0, 1], [0, 1]] and "continues on the CPU" in caplog.text
    assert is_device_fault(RuntimeError("cuDNN error: x")) and not is_device_fault(RuntimeError("shapes differ"))
    assert not is_device_fault(ValueError("CUDA"))


def test_a_crashed_episode_is_not_scored(episodes):
    inner = Scripted()
    crashed, fine = episodes(2)
    crashed = replace(crashed, status="crashed")
    assert SafeReward(inner).score_all([crashed, fine])[0] is crashed
    assert inner.calls == [[1]]


def test_more_than_the_failure_rate_stops_with_the_cause(episodes):
    broken = {n: KeyError(f"sample {n}") for n in range(6)}
    reward = SafeReward(Scripted(broken), retries=0, max_failure_rate=0.5)
    with pytest.raises(RewardFailureError) as stopped:
        reward.score_all(batch := episodes(10))
    message = str(stopped.value)
    assert "failed on 6 of 10 episodes" in message and "reward.max_failure_rate = 0.5" in message
    assert batch[5].task.episode_id in message and "KeyError: 'sample 5'" in message
    assert isinstance(stopped.value, VlarlError) and stopped.value.exit_code == 1
    broken.pop(5)
    scored = SafeReward(Scripted(broken), retries=0, max_failure_rate=0.5).score_all(batch)
    assert sum(t.status == "reward_failed" for t in scored) == 5, "exactly the failure rate is allowed"


def test_it_stops_as_soon_as_the_failure_rate_is_certain(episodes):
    inner = Scripted({n: ValueError("down") for n in range(20)})
    with pytest.raises(RewardFailureError):
        SafeReward(inner, retries=0, max_failure_rate=0.25).score_all(episodes(20))
    assert len(inner.calls) == 6


def test_a_few_episodes_are_judged_together_with_the_next_ones(episodes):
    """One of two is half, and says nothing; but a reward that fails always is detected after eight."""
    reward = SafeReward(Scripted({0: ValueError("x")}), retries=0, max_failure_rate=0.25)
    for _ in range(3):
        reward.score_all(episodes(2))
    with pytest.raises(RewardFailureError, match="4 of 8"):
        reward.score_all(episodes(2))


def test_a_good_past_does_not_excuse_an_iteration(episodes):
    inner = Scripted()
    reward = SafeReward(inner, retries=0, max_failure_rate=0.25)
    for _ in range(10):
        reward.score_all(episodes(8))
    inner.broken = {n: ValueError("x") for n in range(3)}
    with pytest.raises(RewardFailureError, match="3 of 8"):
        reward.score_all(episodes(8))


def test_with_a_failure_rate_of_zero_the_first_failure_stops(episodes):
    with pytest.raises(RewardFailureError, match="1 of 8"):
        SafeReward(Scripted({3: ValueError("x")}), retries=0, max_failure_rate=0.0).score_all(episodes(8))


def test_a_reward_that_hangs_is_not_retried_and_ends_the_run_after_three_in_a_row(episodes):
    hangs = {n: RewardTimeoutError("it has not returned within reward.timeout_s = 1 s.") for n in (0, 1, 3, 4, 5)}
    inner = Scripted(hangs)
    reward = SafeReward(inner, retries=2, max_failure_rate=1.0)
    with pytest.raises(RewardFailureError) as stopped:
        reward.score_all(batch := episodes(10))
    assert inner.calls == [[0], [1], [2], [3], [4], [5]], "two in a row don't end it"
    message = str(stopped.value)
    assert "not returned in time on 3 episodes in a row" in message and batch[5].task.episode_id in message
    assert "raise reward.timeout_s" in message


def test_it_can_be_stopped_before_each_batch(episodes):
    inner, asked = Scripted(batch_size=2), []

    def stop() -> None:
        asked.append(len(inner.calls))
        if len(asked) == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        SafeReward(inner).score_all(episodes(8), stop)
    assert asked == [0, 1, 2] and len(inner.calls) == 2


def test_a_very_long_error_of_a_reward_is_truncated(episodes):
    (scored,) = SafeReward(Scripted({0: ValueError("x" * 50_000_000)}), retries=0).score_all(episodes(1))
    assert scored.reward_error.startswith("ValueError: xxx") and len(scored.reward_error) < 5000


def test_an_interrupt_is_not_a_failure(episodes):
    with pytest.raises(KeyboardInterrupt):
        SafeReward(Scripted({0: KeyboardInterrupt()})).score_all(episodes(1))


def test_failures_in_an_evaluation_are_a_fraction_of_all_its_episodes_in_whatever_portions(episodes):
    inner = Scripted({n: ValueError("no") for n in range(12)})
    reward = SafeReward(inner, retries=0).for_evaluation(24)
    scored = [reward.score(episode) for episode in episodes(24)]
    assert [episode.reward_error is not None for episode in scored] == [True] * 12 + [False] * 12
    with pytest.raises(RewardFailureError, match="the reward failed on 13 of 24 episodes"):
        reward.score(episodes(1)[0])


def test_failures_of_episodes_that_come_a_few_at_a_time_are_a_fraction_of_as_many_as_an_update_has(episodes):
    """12 of 24 may fail; 13 may not, whether they come first or last."""
    for failing, is_refused in ((range(12), False), (range(12, 24), False), (range(13), True), (range(11, 24), True)):
        inner = Scripted({n: ValueError("no") for n in failing})
        reward = SafeReward(inner, retries=0).judged_over(24)
        judged = [reward.score_all(episodes(24)[first : first + 3]) for first in range(0, 21, 3)]
        assert len(judged) == 7
        if is_refused:
            with pytest.raises(RewardFailureError, match="the reward failed on 13 of 24 episodes"):
                reward.score_all(episodes(24)[21:])
        else:
            reward.score_all(episodes(24)[21:])
