"""Advantages: answers worked out by hand and textbook recursions."""

import numpy as np
import pytest

from vlarl.algorithms import build_algorithm
from vlarl.algorithms.advantages import chunk_rewards, discounted_return, gae, group_relative, has_spread
from vlarl.types import TrajectoryGroup


def test_a_group_is_divided_by_its_unbiased_deviation():
    np.testing.assert_allclose(group_relative(np.float32([1, 0]), True), [0.70710578, -0.70710578], atol=1e-6)
    np.testing.assert_allclose(group_relative(np.float32([3, 1, 2]), False), [1, -1, 0])
    tiny = group_relative(np.float32([2e-6, 0]), True)  # 1e-6 / (1.414e-6 + 1e-6)
    np.testing.assert_allclose(tiny, [0.41421, -0.41421], atol=1e-3)


def test_a_group_of_one_has_mean_zero_and_deviation_one():
    np.testing.assert_array_equal(group_relative(np.float32([0.25]), True), [0.25])
    assert has_spread(np.float32([0.0]))


def test_rounding_is_no_spread():
    assert not has_spread(np.float32([0.7, 0.7, 0.7]))
    assert not has_spread(np.float32([0.7, 0.7000001]))
    assert has_spread(np.float32([0.7, 0.701]))


def test_grpo_gives_every_decision_its_episodes_advantage_and_leaves_equal_groups_out(trajectory, configure):
    algorithm = build_algorithm(configure().algorithm, 1.0)
    good = trajectory([[0, 0], [0, 1]], success=True)
    bad = trajectory([[0, 0], [0, 0], [0, 0]])
    estimates = algorithm.estimate(
        [TrajectoryGroup((bad, bad, bad)), TrajectoryGroup((good, bad)), TrajectoryGroup((good, good))], None
    )
    assert [e.trajectory for e in estimates] == [good, bad]
    np.testing.assert_allclose(estimates[0].advantages, [0.7071] * 2, atol=1e-4)
    np.testing.assert_allclose(estimates[1].advantages, [-0.7071] * 3, atol=1e-4)
    assert estimates[0].returns is None and estimates[0].values is None


def test_a_discounted_outcome_counts_executed_steps(trajectory):
    late = trajectory([[0.0, 0.0], [0.0, 1.0]])
    cut = trajectory([[0.0, 0.0], [1.0, 7.0]], num_executed=[2, 1])  # what was not executed is not paid
    assert discounted_return(late, 0.5) == pytest.approx(0.125)
    assert discounted_return(cut, 0.5) == pytest.approx(0.25)
    assert discounted_return(late, 1.0) == 1.0


def test_with_a_discount_the_sooner_success_is_the_better_one(trajectory, configure):
    group = TrajectoryGroup((trajectory([[0.0, 1.0]]), trajectory([[0.0, 0.0], [0.0, 1.0]])))
    undiscounted = build_algorithm(configure(algorithm={"verifier_gamma": 1.0}).algorithm, 1.0)
    assert undiscounted.estimate([group], None) == []
    discounted = build_algorithm(configure(algorithm={"verifier_gamma": 0.9}).algorithm, 1.0)
    sooner, later = discounted.estimate([group], None)
    half = 0.5**0.5  # two values lie half their distance from their mean, and their deviation is that times sqrt 2
    np.testing.assert_allclose(sooner.advantages, [half], rtol=1e-4)
    np.testing.assert_allclose(later.advantages, [-half, -half], rtol=1e-4)


def test_a_chunk_is_one_long_step(trajectory):
    """Two chunks of three, the second stops after two: by hand with gamma 0.5."""
    episode = trajectory([[1, 2, 4], [8, 16, 0]], num_executed=[3, 2])
    rewards, discounts = chunk_rewards(episode, 0.5)
    np.testing.assert_allclose(rewards, [1 + 1 + 1, 8 + 8])
    np.testing.assert_allclose(discounts, [0.125, 0.25])


@pytest.mark.parametrize("terminated", [True, False])
def test_chunked_gae_by_hand(trajectory, terminated):
    episode = trajectory([[1, 2, 4], [8, 16, 0]], num_executed=[3, 2], terminated=terminated)
    values = np.float32([10, 20, 40])
    advantages = gae(*chunk_rewards(episode, 0.5), values, terminated, lam=0.8)
    last = 16 - 20 + (0 if terminated else 0.25 * 40)
    first = (3 + 0.125 * 20 - 10) + 0.125 * 0.8 * last
    np.testing.assert_allclose(advantages, [first, last], atol=1e-5)


def test_with_lambda_one_and_no_discount_the_estimate_is_the_return_minus_the_value(trajectory):
    episode = trajectory([[1.0, 0.5], [0.0, 2.0], [1.0, 0.0]], num_executed=[2, 2, 1], terminated=True)
    values = np.float32([0.3, -0.2, 0.9, 1e9])
    advantages = gae(*chunk_rewards(episode, 1.0), values, True, lam=1.0)
    np.testing.assert_allclose(advantages, np.float32([4.5, 3.0, 1.0]) - values[:3], atol=1e-5)


def test_ppo_normalises_over_executed_tokens_and_keeps_targets_unnormalised(trajectory, configure):
    config = configure(algorithm={"name": "ppo", "gamma": 0.9, "gae_lambda": 0.7}).algorithm
    episodes = [
        trajectory([[0, 0], [0, 1]], num_executed=[2, 1], terminated=True, success=True),
        trajectory([[0, 0], [0, 0]]),
    ]
    values = [np.float32([0.1, 0.2, 5.0]), np.float32([0.3, -0.1, 0.4])]
    estimates = build_algorithm(config, 1.0).estimate([TrajectoryGroup((e,)) for e in episodes], values)
    raw = [gae(*chunk_rewards(e, 0.9), v, e.terminated, 0.7) for e, v in zip(episodes, values, strict=True)]
    by_step = np.concatenate([[raw[0][0]] * 2 + [raw[0][1]], np.repeat(raw[1], 2)])  # a step counts, not a chunk
    for estimate, a, v in zip(estimates, raw, values, strict=True):
        np.testing.assert_allclose(estimate.advantages, (a - by_step.mean()) / by_step.std(), atol=1e-5)
        np.testing.assert_allclose(estimate.returns, a + v[:-1], atol=1e-6)
        np.testing.assert_array_equal(estimate.values, v[:-1])


def test_ppo_without_a_single_whole_episode_has_nothing_to_learn_from(configure):
    assert build_algorithm(configure(algorithm={"name": "ppo"}).algorithm, 1.0).estimate([], []) == []
