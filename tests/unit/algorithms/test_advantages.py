"""Advantages: results worked out by hand and textbook recursions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.groups import flat
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vlarl.algorithms import ALGORITHMS, build_algorithm
from vlarl.algorithms.advantages import (
    against_mean,
    chunk_rewards,
    discounted_back,
    discounted_return,
    executed,
    gae,
    group_relative,
    leave_one_out,
    outcomes,
    penalize,
    returns_differ,
    returns_to_go,
    step_rewards,
    throughout,
    token_rewards,
    trajectory_gae,
    whiten,
)
from vlarl.config.schema import Config
from vlarl.decisions import Row
from vlarl.types import group_members

COMPARING = ["grpo", "rloo", "group_norm", "cpgd", "reinforce_baseline"]


def algorithm(name="grpo", **options):
    config = Config.model_validate({"algorithm": {"name": name, **options}})
    return build_algorithm(config.algorithm, 1.0, config.kl)


def test_a_group_is_divided_by_its_unbiased_std():
    np.testing.assert_allclose(group_relative(np.float32([1, 0]), True), [0.70710578, -0.70710578], atol=1e-6)
    np.testing.assert_allclose(group_relative(np.float32([3, 1, 2]), False), [1, -1, 0])
    tiny = group_relative(np.float32([2e-6, 0]), True)  # 1e-6 / (1.414e-6 + 1e-6)
    np.testing.assert_allclose(tiny, [0.41421, -0.41421], atol=1e-3)


def test_one_left_out_is_compared_with_the_mean_of_the_others():
    np.testing.assert_allclose(leave_one_out(np.float32([3, 1, 2])), [1.5, -1.5, 0])
    np.testing.assert_allclose(leave_one_out(np.float32([1, 0])), [1, -1])


def test_a_baseline_is_the_groups_mean_and_for_single_episodes_the_batchs():
    advantages = against_mean(np.float32([3, 5, 1]), [np.array([0, 2]), np.array([1])])
    np.testing.assert_allclose(advantages, [1, 2, -1])  # the batch's mean is 3


def test_a_group_of_one_has_mean_zero_and_std_one():
    np.testing.assert_array_equal(group_relative(np.float32([0.25]), True), [0.25])
    np.testing.assert_array_equal(leave_one_out(np.float32([0.25])), [0.25])
    assert returns_differ(np.float32([0.0]))


def test_returns_that_differ_by_rounding_are_equal():
    assert not returns_differ(np.float32([0.7, 0.7, 0.7]))
    assert not returns_differ(np.float32([0.7, 0.7000001]))
    assert returns_differ(np.float32([0.7, 0.701]))


@settings(derandomize=True)
@given(arrays(np.float32, st.integers(2, 8), elements=st.floats(-8, 8, width=16)), st.randoms(use_true_random=False))
def test_permuting_a_group_permutes_its_advantages(returns, random):
    order = random.sample(range(len(returns)), len(returns))
    for estimator in (
        lambda r: group_relative(r, True),
        lambda r: group_relative(r, False),
        leave_one_out,
        lambda r: against_mean(r, [np.arange(len(r))]),
    ):
        np.testing.assert_allclose(estimator(returns[order]), estimator(returns)[order], atol=1e-5, rtol=1e-4)


@settings(derandomize=True)
@given(st.floats(-4, 4, width=16), st.integers(2, 6))
def test_equal_returns_have_no_advantage(value, size):
    returns = np.full(size, value, dtype=np.float32)
    assert not returns_differ(returns)
    for advantages in (
        group_relative(returns, False),
        leave_one_out(returns),
        against_mean(returns, [np.arange(size)]),
    ):
        np.testing.assert_allclose(advantages, 0, atol=1e-5)


@pytest.mark.parametrize("name", COMPARING)
def test_groups_that_ended_alike_are_left_out(trajectory, name):
    *alike, good, bad = trajectories = flat(
        (trajectory([[0, 1]]), trajectory([[0, 1]])), (trajectory([[0, 1]]), trajectory([[0, 0]]))
    )
    ref_kl = [np.full((1, 14), k, dtype=np.float32) for k in (0.2, 0.3)]
    estimator = algorithm(name)
    assert not estimator.has_learning_signal(alike) and estimator.with_learning_signal(alike) == []
    kept = estimator.with_learning_signal(trajectories)
    assert kept == [good, bad]
    estimates = estimator.estimate(kept, None, ref_kl, 0.01)
    assert len(estimates) == 2
    assert estimates[0].advantages[0, 0] > 0 > estimates[1].advantages[0, 0]


def test_groups_of_several_rollouts_are_kept_apart(trajectory):
    """Two iterations have a group 0 each: in one list they are two groups, whose members may be anywhere in it."""
    won, lost = trajectory([[0, 1]]), trajectory([[0, 0]])
    first = flat((won, won))
    second = [replace(t, task=replace(t.task, iteration=1)) for t in flat((won, lost))]
    mixed = [first[0], second[0], first[1], second[1]]
    assert [members.tolist() for members in group_members(mixed)] == [[0, 2], [1, 3]]
    assert algorithm().with_learning_signal(mixed) == second
    advantages = algorithm(normalize_std=False).estimate(mixed, None)
    assert [float(e.advantages[0, 0]) for e in advantages] == [0, 0.5, 0, -0.5]


@pytest.mark.parametrize("name", COMPARING)
def test_what_is_left_of_a_group_has_nothing_to_be_compared_with(trajectory, name):
    """One of three survived: it leaves the batch. Two of three that differ can be compared."""
    left, *pair = trajectories = flat(
        (trajectory([[0, 5]]),), (trajectory([[0, 1]]), trajectory([[0, 0]])), sizes=(3, 3)
    )
    estimator = algorithm(name)
    assert not estimator.has_learning_signal([left]) and estimator.has_learning_signal(pair)
    assert estimator.with_learning_signal(trajectories) == pair


@pytest.mark.parametrize("name", COMPARING)
def test_a_configured_group_of_one_keeps_its_member(trajectory, name):
    single = flat((trajectory([[0, 5]]),))
    assert algorithm(name).with_learning_signal(single) == single and len(algorithm(name).estimate(single, None)) == 1


@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp", "ppo"])
def test_methods_that_compare_nothing_are_trained_on_what_is_left(trajectory, name):
    left = flat((trajectory([[0, 1]]),), sizes=(4,))
    values = [np.zeros((2, 1), dtype=np.float32)] if name == "ppo" else None
    assert algorithm(name).with_learning_signal(left) == left and len(algorithm(name).estimate(left, values)) == 1


@pytest.mark.parametrize("level", ["chunk", "step", "token"])
def test_success_on_the_last_step_before_the_time_limit_is_not_bootstrapped(trajectory, level):
    """Terminated and truncated at once: nothing follows a success, even at the time limit."""
    values = {"chunk": [[1], [1e6]], "step": [[1, 1], [1e6, 1e6]], "token": [[1] * 4, [1e6] * 4]}[level]
    won = replace(trajectory([[0, 1]], action_dim=2, terminated=True, success=True), truncated=True)
    late = trajectory([[0, 1]], action_dim=2)
    ppo = algorithm("ppo", gamma=0.5, gae_lambda=0.0, gae_level=level, normalize_advantages="none")
    (estimate,) = ppo.estimate([won], [np.float32(values)])
    assert float(estimate.advantages[0, -1]) == {"chunk": 0.5 - 1, "step": 0.0, "token": 0.0}[level]
    (cut,) = ppo.estimate([late], [np.float32(values)])
    assert float(cut.advantages[0, -1]) > 1e5, "only the time limit: the last value stands for the rest"


@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp", "ppo"])
def test_others_are_trained_on_every_episode(trajectory, name):
    alike = flat((trajectory([[0, 1]]), trajectory([[0, 1]])))
    values = [np.zeros((2, 1), dtype=np.float32)] * 2 if name == "ppo" else None
    assert algorithm(name).with_learning_signal(alike) == alike and len(algorithm(name).estimate(alike, values)) == 2


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_without_a_single_episode_there_is_nothing_to_learn_from(name):
    assert algorithm(name).estimate([], []) == []


def test_grpo_gives_every_decision_its_episodes_advantage(trajectory):
    good, bad = trajectory([[0, 0], [0, 1]], success=True), trajectory([[0, 0], [0, 0], [0, 0]])
    first, second = algorithm().estimate(flat((good, bad)), None)
    np.testing.assert_allclose(first.advantages, [[0.7071]] * 2, atol=1e-4)
    np.testing.assert_allclose(second.advantages, [[-0.7071]] * 3, atol=1e-4)
    assert first.returns is None


def test_rloo_and_baseline_by_hand(trajectory):
    group = flat((trajectory([[3]]), trajectory([[1], [0]]), trajectory([[2]])))
    rloo = algorithm("rloo").estimate(group, None)
    assert [e.advantages.tolist() for e in rloo] == [[[1.5]], [[-1.5], [-1.5]], [[0]]]
    centred = algorithm("reinforce_baseline", normalize_advantages="none").estimate(group, None)
    assert [e.advantages.tolist() for e in centred] == [[[1]], [[-1], [-1]], [[0]]]
    # Four steps hold 1, -1, -1 and 0: mean -1/4, and the unbiased variance is (3 - 4/16) / 3.
    normalized = algorithm("reinforce_baseline").estimate(group, None)
    np.testing.assert_allclose(normalized[0].advantages, [[1.25 / (2.75 / 3) ** 0.5]], rtol=1e-5)


def test_cpgd_has_grpos_advantages(trajectory):
    group = flat((trajectory([[3]]), trajectory([[1]]), trajectory([[2]])))
    equal = algorithm("cpgd", normalize_std=False).estimate(group, None)
    assert [float(e.advantages[0, 0]) for e in equal] == [1, -1, 0]
    by_std = algorithm("cpgd").estimate(group, None)
    np.testing.assert_allclose([e.advantages[0, 0] for e in by_std], [1, -1, 0], atol=1e-5)


def test_group_norm_discounts_the_outcome_back(trajectory):
    group = flat((trajectory([[0, 0], [1, 0]], num_executed=[2, 1]), trajectory([[0, 0]])))
    good, bad = algorithm("group_norm", normalize_std=False, gamma=0.5).estimate(group, None)
    np.testing.assert_allclose(good.advantages, [[0.125, 0.25], [0.5, 0]])  # the last step was not executed
    np.testing.assert_allclose(bad.advantages, [[-0.25, -0.5]])


def test_reinforce_assigns_to_each_step_its_rewards_to_go(trajectory):
    episode = trajectory([[1, 2], [4, 0]], num_executed=[2, 1])
    np.testing.assert_allclose(returns_to_go(episode, 0.5), [[1 + 1 + 1, 2 + 2], [4, 0]])
    (estimate,) = algorithm("reinforce", gamma=0.5).estimate([episode], None)
    np.testing.assert_allclose(estimate.advantages, [[3, 4], [4, 0]])


def test_reinforce_pp_normalises_what_followed_over_the_batch(trajectory):
    group = flat((trajectory([[0, 1]]), trajectory([[0, 7]], num_executed=[1])))
    first, second = algorithm("reinforce_pp", gamma=1.0).estimate(group, None)
    # Executed steps hold 1, 1 and 0: mean 2/3, unbiased std sqrt(1/3).
    np.testing.assert_allclose(first.advantages, [[1 / 3 * 3**0.5] * 2], rtol=1e-5)
    np.testing.assert_allclose(second.advantages, [[-2 / 3 * 3**0.5, 0]], rtol=1e-5)


def test_a_discounted_outcome_counts_executed_steps(trajectory):
    late = trajectory([[0.0, 0.0], [0.0, 1.0]])
    cut = trajectory([[0.0, 0.0], [1.0, 7.0]], num_executed=[2, 1])  # steps that were not executed get no reward
    assert discounted_return(late, 0.5) == pytest.approx(0.125)
    assert discounted_return(cut, 0.5) == pytest.approx(0.25)
    assert discounted_return(late, 1.0) == 1.0
    np.testing.assert_allclose(outcomes([late, cut], 0.5), [0.125, 0.25])


def test_with_a_discount_the_sooner_success_is_the_better_one(trajectory):
    group = flat((trajectory([[0.0, 1.0]]), trajectory([[0.0, 0.0], [0.0, 1.0]])))
    assert algorithm(verifier_gamma=1.0).with_learning_signal(group) == []
    sooner, later = algorithm(verifier_gamma=0.9).estimate(group, None)
    half = 0.5**0.5  # two values lie half their distance from their mean, and their std is that times sqrt 2
    np.testing.assert_allclose(sooner.advantages, [[half]], rtol=1e-4)
    np.testing.assert_allclose(later.advantages, [[-half], [-half]], rtol=1e-4)


def test_one_advantage_an_episode_is_the_same_at_every_decision(trajectory):
    group = flat((trajectory([[0], [0]]), trajectory([[0]])))
    advantages = throughout(group, np.float32([2, 3]))
    assert [a.tolist() for a in advantages] == [[[2], [2]], [[3]]]


def test_a_chunk_is_one_long_step(trajectory):
    """Two chunks of three, the second stops after two: by hand with gamma 0.5."""
    episode = trajectory([[1, 2, 4], [8, 16, 0]], num_executed=[3, 2])
    rewards, discounts = chunk_rewards(episode, 0.5)
    np.testing.assert_allclose(rewards, [1 + 1 + 1, 8 + 8])
    np.testing.assert_allclose(discounts, [0.125, 0.25])


def test_steps_and_tokens_in_line(trajectory):
    episode = trajectory([[1, 2], [4, 9]], num_executed=[2, 1], action_dim=2)
    rewards, discounts = step_rewards(episode, 0.5)
    assert (rewards.tolist(), discounts.tolist()) == ([1, 2, 4], [0.5, 0.5, 0.5])
    rewards, discounts = token_rewards(episode, 0.5)
    assert rewards.tolist() == [0, 1, 0, 2, 0, 4]
    assert discounts.tolist() == [1, 0.5, 1, 0.5, 1, 0.5]


def test_executed_steps_at_each_level(trajectory):
    episode = trajectory([[0, 0, 0], [0, 0, 0]], num_executed=[3, 1], action_dim=2)
    assert executed(episode, "chunk", 1).tolist() == [[3], [1]]
    assert executed(episode, "step", 3).tolist() == [[1, 1, 1], [1, 0, 0]]
    assert executed(episode, "token", 6).tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]
    assert executed(episode, "token", 8).tolist() == [[1] * 6 + [0, 0], [1, 1] + [0] * 6], "padded as in the batch"


def test_elements_that_a_decision_masks_are_not_executed(trajectory):
    """Two steps of two elements, of which the second element is padding: it has no reward and no value."""
    episode = trajectory([[1, 2]], action_dim=2)
    (only,) = episode.transitions
    mask = torch.tensor([[True, False, True, True]])
    episode = replace(episode, transitions=(replace(only, decided=Row(replace(only.decision, mask=mask), 0)),))
    assert executed(episode, "token", 4).tolist() == [[1, 0, 1, 1]]
    rewards, discounts = token_rewards(episode, 0.5)
    assert (rewards.tolist(), discounts.tolist()) == ([1, 0, 2], [0.5, 1, 0.5])


@pytest.mark.parametrize("terminated", [True, False])
def test_chunked_gae_by_hand(trajectory, terminated):
    episode = trajectory([[1, 2, 4], [8, 16, 0]], num_executed=[3, 2], terminated=terminated)
    values = np.float32([[10], [20], [40]])
    advantages = trajectory_gae(episode, values, "chunk", 0.5, lam=0.8)
    last = 16 - 20 + (0 if terminated else 0.25 * 40)
    first = (3 + 0.125 * 20 - 10) + 0.125 * 0.8 * last
    np.testing.assert_allclose(advantages, [[first], [last]], atol=1e-5)


@pytest.mark.parametrize("terminated", [True, False])
def test_gae_over_steps_by_hand(trajectory, terminated):
    """Two chunks of two, the second stops after one: what follows the first chunk is the second's first value."""
    episode = trajectory([[1, 2], [4, 0]], num_executed=[2, 1], terminated=terminated)
    values = np.float32([[10, 20], [30, 1e9], [40, 1e9]])  # values of steps that never ran are absurd
    a2 = 4 - 30 + (0 if terminated else 0.5 * 40)
    a1 = 2 + 0.5 * 30 - 20 + 0.5 * 0.8 * a2
    a0 = 1 + 0.5 * 20 - 10 + 0.5 * 0.8 * a1
    np.testing.assert_allclose(trajectory_gae(episode, values, "step", 0.5, 0.8), [[a0, a1], [a2, 0]], atol=1e-4)


@pytest.mark.parametrize("terminated", [True, False])
def test_gae_over_tokens_by_hand(trajectory, terminated):
    """One step of two tokens, then another: gamma lies between the steps, lambda between all tokens."""
    episode = trajectory([[1, 2]], action_dim=2, terminated=terminated)
    values = np.float32([[1, 2, 3, 4], [5, 1e9, 1e9, 1e9]])
    a3 = 2 - 4 + (0 if terminated else 0.5 * 5)
    a2 = 0 + 4 - 3 + 0.8 * a3
    a1 = 1 + 0.5 * 3 - 2 + 0.5 * 0.8 * a2
    a0 = 0 + 2 - 1 + 0.8 * a1
    np.testing.assert_allclose(trajectory_gae(episode, values, "token", 0.5, 0.8), [[a0, a1, a2, a3]], atol=1e-5)


def test_all_levels_agree_on_chunks_of_one_action_of_one_number(trajectory):
    episode = trajectory([[1.0], [0.0], [2.0]], action_dim=1)
    values = np.float32([[0.3], [-0.2], [0.9], [0.5]])
    chunk, step, token = (trajectory_gae(episode, values, level, 0.9, 0.7) for level in ("chunk", "step", "token"))
    np.testing.assert_allclose(step, chunk, atol=1e-6)
    np.testing.assert_allclose(token, chunk, atol=1e-6)


def test_values_that_do_not_fit_the_level_are_refused(trajectory):
    with pytest.raises(ValueError, match="1 values a decision don't fit gae_level 'step'"):
        trajectory_gae(trajectory([[1, 2]]), np.zeros((2, 1), dtype=np.float32), "step", 0.9, 0.9)


def test_with_lambda_one_and_no_discount_the_estimate_is_the_return_minus_the_value(trajectory):
    episode = trajectory([[1.0, 0.5], [0.0, 2.0], [1.0, 0.0]], num_executed=[2, 2, 1], terminated=True)
    values = np.float32([0.3, -0.2, 0.9, 1e9])
    advantages = gae(*chunk_rewards(episode, 1.0), values, True, lam=1.0)
    np.testing.assert_allclose(advantages, np.float32([4.5, 3.0, 1.0]) - values[:3], atol=1e-5)


def test_ppo_normalises_over_executed_steps_and_keeps_targets_unnormalised(trajectory):
    episodes = [
        trajectory([[0, 0], [0, 1]], num_executed=[2, 1], terminated=True, success=True),
        trajectory([[0, 0], [0, 0]]),
    ]
    values = [np.float32([[0.1], [0.2], [5.0]]), np.float32([[0.3], [-0.1], [0.4]])]
    ppo = algorithm("ppo", gamma=0.9, gae_lambda=0.7)
    estimates = ppo.estimate(episodes, values)
    raw = [trajectory_gae(e, v, "chunk", 0.9, 0.7) for e, v in zip(episodes, values, strict=True)]
    by_step = np.concatenate([[raw[0][0, 0]] * 2 + [raw[0][1, 0]], np.repeat(raw[1], 2)])  # a step counts, not a chunk
    for estimate, a, v in zip(estimates, raw, values, strict=True):
        np.testing.assert_allclose(estimate.advantages, (a - by_step.mean()) / by_step.std(), atol=1e-5)
        np.testing.assert_allclose(estimate.returns, a + v[:-1], atol=1e-6)


def test_whitening_by_hand():
    parts, counts = [np.float32([[1], [9]]), np.float32([[4]])], [np.array([[2], [0]]), np.array([[1]])]
    # 1, 1 and 4 count: mean 2, variance 2; 9 counts for nothing.
    shifted = whiten(parts, counts, shift_mean=True)
    np.testing.assert_allclose(np.concatenate(shifted).ravel(), [-(0.5**0.5), 0, 2**0.5], rtol=1e-6)
    scaled = whiten(parts, counts, shift_mean=False)
    np.testing.assert_allclose(np.concatenate(scaled).ravel(), [0.5**0.5, 0, 4 * 0.5**0.5], rtol=1e-6)
    unbiased = whiten(parts, counts, shift_mean=True, lost_degrees=1)
    np.testing.assert_allclose(np.concatenate(unbiased).ravel(), [-(1 / 3**0.5), 0, 2 / 3**0.5], rtol=1e-6)


def test_whitening_counts_nothing_that_was_not_executed():
    """Neither NaN there, nor a batch of which nothing counts, makes 0/0."""
    (part,) = whiten([np.float32([[1], [np.nan], [3]])], [np.array([[1], [0], [1]])], shift_mean=True)
    np.testing.assert_allclose(part, [[-1], [0], [1]], rtol=1e-6)
    (part,) = whiten([np.float32([[5], [7]])], [np.array([[0], [0]])], shift_mean=True)
    assert part.tolist() == [[0], [0]]


def test_whitening_of_equal_values_is_zero_and_not_infinite():
    (part,) = whiten([np.float32([[3], [3]])], [np.array([[1], [1]])], shift_mean=True)
    assert part.tolist() == [[0], [0]]


def test_advantages_are_normalised_and_bounded_as_configured(trajectory):
    group = flat((trajectory([[3]]), trajectory([[1]]), trajectory([[2]])))

    def of(**options):
        return [float(e.advantages[0, 0]) for e in algorithm("rloo", **options).estimate(group, None)]

    assert of() == [1.5, -1.5, 0] and of(advantage_clamp=1.0) == [1, -1, 0]
    np.testing.assert_allclose(of(normalize_advantages="scale"), [1.5**0.5, -(1.5**0.5), 0], rtol=1e-5)
    singles = flat(*((t,) for t in group))
    returns = [e.advantages[0, 0] for e in algorithm("reinforce", normalize_advantages="batch").estimate(singles, None)]
    np.testing.assert_allclose(returns, [1.5**0.5, -(1.5**0.5), 0], atol=1e-5)


def test_the_kl_of_a_step_is_taken_off_its_reward(trajectory):
    episode = trajectory([[1, 2], [4, 0]], num_executed=[2, 1], action_dim=2)
    ref_kl = np.float32([[0.1, 0.2, -0.3, 0.4], [1.0, 1.0, 0.0, 0.0]])
    (penalized,) = penalize([episode], [ref_kl], 0.5)
    rewards = [t.rewards for t in penalized.transitions]
    np.testing.assert_allclose(rewards, [[1 - 0.15, 2 - 0.05], [4 - 1, 0]], rtol=1e-6)
    (estimate,) = algorithm("reinforce", gamma=1.0).estimate([episode], None, [ref_kl], 0.5)
    np.testing.assert_allclose(estimate.advantages, [[5.8, 4.95], [3, 0]], rtol=1e-6)
    assert [t.rewards.tolist() for t in episode.transitions] == [[1, 2], [4, 0]]  # its own rewards stay as they are


def test_an_outcome_discounted_back_ends_at_the_last_executed_step(trajectory):
    episode = trajectory([[5, 5], [5, 5]], num_executed=[2, 1])
    np.testing.assert_allclose(discounted_back(episode, 8.0, 0.5), [[2, 4], [8, 0]])


def test_which_discount_an_algorithm_reads():
    config = Config.model_validate({"algorithm": {"gamma": 0.5, "verifier_gamma": 0.25}}).algorithm
    read = {name: kind.discount(config) for name, kind in ALGORITHMS.items()}
    assert {name for name, gamma in read.items() if gamma == 0.5} == {"ppo", "reinforce", "reinforce_pp"}


def test_a_decision_without_an_executed_element_has_no_token_rewards(trajectory):
    episode = trajectory([[1, 2]], num_executed=[0], action_dim=2)
    rewards, discounts = token_rewards(episode, 0.5)
    assert len(rewards) == len(discounts) == 0
