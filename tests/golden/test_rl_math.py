"""The RL mathematics against arrays of the original implementations."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vlarl.algorithms import build_algorithm
from vlarl.algorithms.advantages import chunk_rewards, gae, group_relative
from vlarl.algorithms.aggregate import token_weights
from vlarl.algorithms.kl import ESTIMATORS
from vlarl.algorithms.losses import clipped_policy_loss, cpgd_loss, masked_sum, value_loss
from vlarl.types import TrajectoryGroup

GAMMA, LAMBDA = 0.99, 0.95


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    with np.load(Path(__file__).parent / "rl_math" / "rl_math.npz") as arrays:
        return {name: torch.from_numpy(np.asarray(arrays[name])) for name in arrays}


def mean_of_sequence_means(x: torch.Tensor, mask: torch.Tensor) -> float:
    """By the weights that the learner gives tokens; every row of the golden arrays is a sequence of its own."""
    return float((x * token_weights(mask.bool(), torch.arange(len(mask)), "sequence_mean")).sum())


def test_policy_loss_with_asymmetric_clip_over_tokens(golden):
    ratio = (golden["logprobs"] - golden["old_logprobs"]).exp()
    loss, clipped = clipped_policy_loss(ratio, golden["advantages"], 0.2, 0.28)
    mask = golden["mask"].bool()
    assert float(masked_sum(loss, mask) / mask.sum()) == pytest.approx(
        float(golden["ppo_asym_tokenmean_loss"]), abs=1e-6
    )
    clipfrac = masked_sum(clipped.float(), mask) / mask.sum()
    assert float(clipfrac) == pytest.approx(float(golden["ppo_asym_clipfrac"]), abs=1e-6)


def test_policy_loss_with_symmetric_clip_over_sequences(golden):
    ratio = (golden["logprobs"] - golden["old_logprobs"]).exp()
    loss, _ = clipped_policy_loss(ratio, golden["advantages"], 0.2, 0.2)
    expected = float(golden["ppo_sym02_seqmean_loss"])
    assert mean_of_sequence_means(loss, golden["mask"]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("cliprange", "name"), [(0.2, "value_clip02_seqmean_loss"), (None, "value_noclip_seqmean_loss")]
)
def test_value_loss(golden, cliprange, name):
    loss = value_loss(golden["values"], golden["old_values"], golden["returns"], cliprange)
    assert mean_of_sequence_means(loss, golden["mask"]) == pytest.approx(float(golden[name]), abs=1e-6)


def test_cpgd_loss_over_sequences(golden):
    loss, _ = cpgd_loss(golden["logprobs"], golden["old_logprobs"], golden["advantages"], 0.2, 0.2)
    expected = float(golden["cpgd_seqmean_loss"])
    assert mean_of_sequence_means(loss, golden["mask"]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["kl_k1", "kl_k2", "kl_k3"])
def test_kl_estimators(golden, name):
    ours = ESTIMATORS[name.removeprefix("kl_")](golden["logprobs"], golden["ref_logprobs"]) * golden["mask"]
    torch.testing.assert_close(ours, golden[name], atol=1e-6, rtol=1e-5)


def test_approximate_kl_from_the_acting_policy(golden):
    """The original reports k1 of the acting policy from the trained one, over tokens."""
    mask = golden["mask"].bool()
    ours = masked_sum(ESTIMATORS["k1"](golden["old_logprobs"], golden["logprobs"]), mask) / mask.sum()
    assert float(ours) == pytest.approx(float(golden["ppo_asym_approx_kl_k1"]), abs=1e-6)


def test_reinforce_pp_advantages(golden, trajectory, configure):
    """An episode of as many steps as the golden sequence has tokens, paid at its end, and not discounted."""
    lengths = golden["mask"].sum(dim=1).int().tolist()
    episodes = [
        trajectory([[0.0]] * (length - 1) + [[float(reward)]], action_dim=1)
        for length, reward in zip(lengths, golden["outcome_rewards"], strict=True)
    ]
    config = configure(algorithm={"name": "reinforce_pp", "gamma": 1.0})
    estimates = build_algorithm(config.algorithm, 1.0).estimate([TrajectoryGroup((e,)) for e in episodes], None)
    for row, (estimate, length) in enumerate(zip(estimates, lengths, strict=True)):
        expected = golden["reinforcepp_advantages"][row, :length].numpy()
        np.testing.assert_allclose(estimate.advantages[:, 0], expected, atol=1e-6)


def test_every_golden_array_is_compared(golden):
    inputs = {"logprobs", "old_logprobs", "ref_logprobs", "advantages", "mask", "values", "old_values", "returns"}
    inputs |= {"group_ids", "outcome_rewards", "gae_rewards", "gae_values", "gae_dones", "gae_last_value"}
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in sorted(set(golden) - inputs) if f'"{name}"' not in source] == []


def test_group_relative_advantages(golden):
    rewards, groups = golden["outcome_rewards"].numpy(), golden["group_ids"].numpy()
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        expected = golden["grpo_advantages"].numpy()[rows, 0]
        np.testing.assert_allclose(group_relative(rewards[rows], True), expected, atol=2e-6)


def test_generalised_advantages_with_chunks_of_one(golden, trajectory):
    """The golden arrays are [20 steps, 5 environments] with many episodes each; ours is one trajectory an episode."""
    rewards, values, dones = (golden[f"gae_{name}"].numpy() for name in ("rewards", "values", "dones"))
    num_steps, num_envs = rewards.shape
    checked = 0
    for env in range(num_envs):
        ends = [t for t in range(num_steps) if dones[t, env]]
        bounds = [0, *(t + 1 for t in ends), num_steps]
        for start, stop in zip(bounds, bounds[1:], strict=False):
            if start == stop:
                continue
            terminated = stop - 1 in ends
            episode = trajectory([[r] for r in rewards[start:stop, env]], terminated=terminated)
            scored, discounts = chunk_rewards(episode, GAMMA)
            # After a terminated episode the next value must not matter, so it is made absurd.
            last = 1e6 if terminated else float(golden["gae_last_value"][env])
            ours = gae(scored, discounts, np.append(values[start:stop, env], np.float32(last)), terminated, LAMBDA)
            np.testing.assert_allclose(ours, golden["gae_advantages"].numpy()[start:stop, env], atol=1e-5)
            np.testing.assert_allclose(
                ours + values[start:stop, env], golden["gae_returns"].numpy()[start:stop, env], atol=1e-5
            )
            checked += stop - start
    assert checked == rewards.size


def test_zero_spread_is_zero_advantage_in_the_golden_arrays_and_nothing_in_ours(golden, trajectory, configure):
    rewards, ids = golden["outcome_rewards"].numpy(), golden["group_ids"].numpy()
    groups = [
        TrajectoryGroup(tuple(trajectory([[0.0], [float(rewards[i])]], group=int(g)) for i in np.flatnonzero(ids == g)))
        for g in np.unique(ids)
    ]
    estimates = build_algorithm(configure().algorithm, 1.0).estimate(groups, None)
    kept = [i for i in range(len(ids)) if ids[i] != 1]  # group 1 failed throughout
    assert len(estimates) == len(kept)
    for estimate, i in zip(estimates, kept, strict=True):
        np.testing.assert_allclose(estimate.advantages, golden["grpo_advantages"].numpy()[i, :2, None], atol=2e-6)
    assert (golden["grpo_advantages"][ids == 1] == 0).all()
