"""What tokens count, by hand."""

import pytest
import torch

from vlarl.algorithms.aggregate import token_weights

MASK = torch.tensor([[True, True], [True, False], [True, False], [False, False]])
TRAJECTORY = torch.tensor([7, 7, 2, 5])  # indices in the whole batch, of which a minibatch has some


def test_with_token_mean_every_executed_token_counts_the_same():
    expected = torch.tensor([[0.25, 0.25], [0.25, 0.0], [0.25, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(token_weights(MASK, TRAJECTORY, "token_mean"), expected)


def test_with_sequence_mean_every_trajectory_that_did_something_counts_the_same():
    sixth = 1 / 6
    expected = torch.tensor([[sixth, sixth], [sixth, 0.0], [0.5, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(token_weights(MASK, TRAJECTORY, "sequence_mean"), expected)


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
def test_weights_sum_to_one_and_an_empty_mask_has_none(how):
    assert float(token_weights(MASK, TRAJECTORY, how).sum()) == pytest.approx(1)
    assert not token_weights(torch.zeros_like(MASK), TRAJECTORY, how).any()
