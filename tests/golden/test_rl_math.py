"""The RL mathematics against arrays of the original implementations."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from fakes.golden_arrays import Arrays, constant, load_arrays, unnoticed
from fakes.golden_folder import golden_folder

from vlarl.algorithms import build_algorithm
from vlarl.algorithms.advantages import chunk_rewards, gae, group_relative
from vlarl.algorithms.aggregate import token_weights
from vlarl.algorithms.kl import ESTIMATORS
from vlarl.algorithms.losses import clipped_policy_loss, cpgd_loss, masked_sum, value_loss
from vlarl.config.schema import AlgorithmConfig
from vlarl.types import Trajectory

Episodes = Callable[..., Trajectory]  # the fixture `trajectory`


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_arrays(golden_folder("rl_math") / "rl_math.npz")


def tensors(golden: Arrays, *names: str) -> list[torch.Tensor]:
    return [torch.from_numpy(golden[name]) for name in names]


def assert_equal(ours: torch.Tensor | np.ndarray | float, theirs: np.ndarray) -> None:
    """To 1e-6, or 16 times the last digit of the largest number."""
    largest = float(np.abs(theirs).max()) if theirs.size else 0.0
    np.testing.assert_allclose(ours, theirs, atol=max(1e-6, 16 * np.finfo(np.float32).eps * largest), rtol=0)


def mean_of_sequence_means(x: torch.Tensor, mask: torch.Tensor) -> float:
    """By the weights that the learner gives tokens; every row of the golden arrays is a sequence of its own."""
    return float((x * token_weights(mask.bool(), torch.arange(len(mask)), "sequence_mean")).sum())


def token_mean(x: torch.Tensor, mask: torch.Tensor) -> float:
    return float(masked_sum(x, mask.bool()) / mask.bool().sum())


def check_policy_loss_with_asymmetric_clip_over_tokens(golden: Arrays, trajectory: Episodes) -> None:
    logprobs, old, advantages, mask = tensors(golden, "logprobs", "old_logprobs", "advantages", "mask")
    low, high = constant(golden, "clip_low"), constant(golden, "clip_high")
    loss, clipped = clipped_policy_loss((logprobs - old).exp(), advantages, low, high)
    assert_equal(token_mean(loss, mask), golden["ppo_asym_tokenmean_loss"])
    assert_equal(token_mean(clipped.float(), mask), golden["ppo_asym_clipfrac"])


def check_policy_loss_with_symmetric_clip_over_sequences(golden: Arrays, trajectory: Episodes) -> None:
    logprobs, old, advantages, mask = tensors(golden, "logprobs", "old_logprobs", "advantages", "mask")
    clip = constant(golden, "clip")
    loss, _ = clipped_policy_loss((logprobs - old).exp(), advantages, clip, clip)
    assert_equal(mean_of_sequence_means(loss, mask), golden["ppo_sym02_seqmean_loss"])


def check_value_loss(golden: Arrays, trajectory: Episodes) -> None:
    values, old, returns, mask = tensors(golden, "values", "old_values", "returns", "mask")
    for cliprange, name in ((constant(golden, "value_clip"), "value_clip02"), (None, "value_noclip")):
        loss = value_loss(values, old, returns, cliprange)
        assert_equal(mean_of_sequence_means(loss, mask), golden[f"{name}_seqmean_loss"])


def check_cpgd_loss_over_sequences(golden: Arrays, trajectory: Episodes) -> None:
    logprobs, old, advantages, mask = tensors(golden, "logprobs", "old_logprobs", "advantages", "mask")
    clip = constant(golden, "clip")
    loss, _ = cpgd_loss(logprobs, old, advantages, clip, clip)
    assert_equal(mean_of_sequence_means(loss, mask), golden["cpgd_seqmean_loss"])


def check_kl_estimators(golden: Arrays, trajectory: Episodes) -> None:
    logprobs, reference, mask = tensors(golden, "logprobs", "ref_logprobs", "mask")
    for name in ("k1", "k2", "k3"):
        assert_equal(ESTIMATORS[name](logprobs, reference) * mask, golden[f"kl_{name}"])


def check_approximate_kl_from_the_acting_policy(golden: Arrays, trajectory: Episodes) -> None:
    """The original reports k1 of the acting policy from the trained one, over tokens."""
    logprobs, old, mask = tensors(golden, "logprobs", "old_logprobs", "mask")
    assert_equal(token_mean(ESTIMATORS["k1"](old, logprobs), mask), golden["ppo_asym_approx_kl_k1"])


def check_reinforce_pp_advantages(golden: Arrays, trajectory: Episodes) -> None:
    """An episode of as many steps as the golden sequence has tokens, rewarded at its end, and not discounted."""
    mask = golden["mask"].astype(bool)
    episodes = [
        trajectory([[0.0]] * (int(row.sum()) - 1) + [[float(reward)]], action_dim=1)
        for row, reward in zip(mask, golden["outcome_rewards"], strict=True)
    ]
    config = AlgorithmConfig(name="reinforce_pp", gamma=1.0)
    estimates = build_algorithm(config, 1.0).estimate(episodes, None)
    for estimate, row, theirs in zip(estimates, mask, golden["reinforcepp_advantages"], strict=True):
        assert_equal(estimate.advantages[:, 0], theirs[row])


def check_group_relative_advantages(golden: Arrays, trajectory: Episodes) -> None:
    rewards, groups, mask = golden["outcome_rewards"], golden["group_ids"], golden["mask"]
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        ours = group_relative(rewards[rows], True)
        assert_equal(ours[:, None] * mask[rows], golden["grpo_advantages"][rows] * mask[rows])


def check_generalised_advantages_with_chunks_of_one(golden: Arrays, trajectory: Episodes) -> None:
    """The golden arrays are [steps, environments] with many episodes each; ours is one trajectory an episode."""
    rewards, values, dones = (golden[f"gae_{name}"] for name in ("rewards", "values", "dones"))
    gamma, lam = constant(golden, "gamma"), constant(golden, "lambda")
    advantages = np.full_like(rewards, np.nan)
    for env in range(rewards.shape[1]):
        ends = [int(t) for t in np.flatnonzero(dones[:, env])]
        bounds = [0, *(t + 1 for t in ends), len(rewards)]
        for start, stop in zip(bounds, bounds[1:], strict=False):
            if start == stop:
                continue
            terminated = stop - 1 in ends
            episode = trajectory([[r] for r in rewards[start:stop, env]], terminated=terminated)
            scored, discounts = chunk_rewards(episode, gamma)
            # After a terminated episode the next value must not matter, so it is made absurd.
            last = 1e6 if terminated else float(golden["gae_last_value"][env])
            along = np.append(values[start:stop, env], np.float32(last))
            advantages[start:stop, env] = gae(scored, discounts, along, terminated, lam)
    assert_equal(advantages, golden["gae_advantages"])
    assert_equal(advantages + values, golden["gae_returns"])


CHECKS = (
    check_policy_loss_with_asymmetric_clip_over_tokens,
    check_policy_loss_with_symmetric_clip_over_sequences,
    check_value_loss,
    check_cpgd_loss_over_sequences,
    check_kl_estimators,
    check_approximate_kl_from_the_acting_policy,
    check_reinforce_pp_advantages,
    check_group_relative_advantages,
    check_generalised_advantages_with_chunks_of_one,
)


@pytest.mark.parametrize("check", CHECKS)
def test_equals_the_original(golden, trajectory, check):
    check(golden, trajectory=trajectory)


def test_every_golden_array_is_compared(golden, trajectory):
    assert unnoticed(golden, [partial(check, trajectory=trajectory) for check in CHECKS]) == []


def test_equal_returns_have_zero_advantage_in_the_golden_arrays_and_are_removed_in_ours(golden, trajectory, configure):
    """Groups of one are left out: they have nothing to be compared with."""
    rewards, ids, theirs = golden["outcome_rewards"], golden["group_ids"], golden["grpo_advantages"]
    rows = [np.flatnonzero(ids == group) for group in np.unique(ids)]
    several = [members for members in rows if len(members) > 1]
    trajectories = [trajectory([[0.0], [float(rewards[i])]], group=int(ids[i])) for members in several for i in members]
    algorithm = build_algorithm(configure().algorithm, 1.0)
    estimates = algorithm.estimate(algorithm.with_learning_signal(trajectories), None)
    kept = [i for members in several if np.ptp(rewards[members]) > 0 for i in members]
    assert len(estimates) == len(kept)
    for estimate, i in zip(estimates, kept, strict=True):
        assert_equal(estimate.advantages, np.broadcast_to(theirs[i, :1, None], (2, 1)))
    for members in several:
        assert np.ptp(rewards[members]) > 0 or (theirs[members] == 0).all()
