"""Batches: which tokens count, that every row is used once, and what sums are divided by."""

import numpy as np
import pytest
import torch

from vlarl.algorithms.base import Estimate
from vlarl.policies.tiny import init_tiny
from vlarl.training.batching import build_batch, denominators, microbatches, minibatches, observations_with_last


@pytest.fixture(scope="module")
def policy():
    return init_tiny("parallel", seed=0, chunk_length=3)


def test_rows_keep_their_order_and_tokens_past_the_end_are_masked(policy, trajectory):
    first = trajectory([[0] * 3, [0] * 3], num_executed=[3, 1], seed=1)
    second = trajectory([[0] * 3], num_executed=[2], seed=2)
    estimates = [
        Estimate(first, np.float32([0.5, -1]), np.float32([1, 2]), np.float32([3, 4])),
        Estimate(second, np.float32([7]), np.float32([5]), np.float32([6])),
    ]
    batch = build_batch(estimates, policy)
    assert batch.mask.sum(dim=1).tolist() == [21, 7, 14]
    assert batch.mask.tolist() == [[t < n for t in range(21)] for n in (21, 7, 14)]
    assert batch.advantages[:, 0].tolist() == [0.5, -1, 7]
    assert (batch.advantages == batch.advantages[:, :1]).all() and batch.advantages.shape == (3, 21)
    assert batch.returns.tolist() == [1, 2, 5] and batch.old_values.tolist() == [3, 4, 6]
    taken = [*first.transitions, *second.transitions]
    np.testing.assert_array_equal(batch.token_ids.numpy(), np.stack([t.token_ids for t in taken]))
    np.testing.assert_array_equal(batch.old_logprobs.numpy(), np.stack([t.engine_logprobs for t in taken]))
    assert (batch.token_ids - batch.places == policy.codec.first_id).all()
    assert batch.places.min() >= 0 and batch.places.max() < 256
    alone = policy.process([taken[1].observation])
    row = batch.inputs.rows(torch.tensor([1]))
    assert torch.equal(row.input_ids, alone.input_ids) and torch.equal(row.pixels, alone.pixels)
    assert torch.equal(row.proprio, alone.proprio)


def test_without_a_critic_there_are_no_value_targets(policy, trajectory):
    batch = build_batch([Estimate(trajectory([[0] * 3]), np.float32([1]))], policy)
    assert batch.returns is None and batch.old_values is None
    assert batch.rows(torch.tensor([0])).returns is None


@pytest.mark.parametrize(("num_rows", "parts"), [(10, 1), (10, 3), (7, 7), (2, 5)])
def test_minibatches_use_every_row_once(num_rows, parts):
    shares = minibatches(num_rows, parts, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(shares).tolist()) == list(range(num_rows))
    sizes = [len(s) for s in shares]
    assert len(shares) == min(num_rows, parts) and max(sizes) - min(sizes) <= 1
    again = minibatches(num_rows, parts, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(shares, again, strict=True))


def test_minibatches_are_shuffled():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.cat(minibatches(50, 2, generator)).tolist() for _ in range(2))
    assert first != sorted(first) and first != second


def test_microbatches_keep_order_and_lose_nothing():
    rows = torch.tensor([5, 2, 9, 4, 1])
    assert [m.tolist() for m in microbatches(rows, 2)] == [[5, 2], [9, 4], [1]]


def test_denominators_count_executed_tokens_of_the_chosen_rows(policy, trajectory):
    episode = trajectory([[0] * 3] * 3, num_executed=[3, 1, 2])
    batch = build_batch([Estimate(episode, np.zeros(3, np.float32))], policy)
    over = denominators(batch, torch.tensor([0, 2]))
    assert (over.num_tokens, over.num_decisions) == (35, 2)
    nothing = denominators(batch, torch.tensor([], dtype=torch.int64))
    assert (nothing.num_tokens, nothing.num_decisions) == (1, 1)


def test_the_last_observation_follows_the_decisions(trajectory):
    episode = trajectory([[0], [0]])
    assert observations_with_last(episode) == [
        episode.transitions[0].observation,
        episode.transitions[1].observation,
        episode.final_observation,
    ]
