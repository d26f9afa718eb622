"""Loss terms, element by element, by hand."""

import pytest
import torch
from loss_problem import Actor

from vlarl.algorithms.losses import (
    clipped_policy_loss,
    cpgd_loss,
    dual_clip,
    high_entropy_tokens,
    masked_sum,
    probability_ratio,
    step_sums,
    value_loss,
)
from vlarl.policies.openvla.decisions import reconstruction_loss

TWO_STEPS = torch.tensor([[0, 0, 1, 1]])


def test_asymmetric_clip_by_hand():
    ratio = torch.tensor([1.3, 1.3, 0.7, 0.7, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    loss, clipped = clipped_policy_loss(ratio, advantages, 0.2, 0.28)
    torch.testing.assert_close(loss, torch.tensor([-1.28, 1.3, -0.7, 0.8, -2.2]))
    assert clipped.tolist() == [True, False, False, True, False]


def test_symmetric_clip_by_hand():
    loss, clipped = clipped_policy_loss(torch.tensor([1.3, 0.7]), torch.tensor([1.0, -1.0]), 0.2, 0.2)
    torch.testing.assert_close(loss, torch.tensor([-1.2, 0.8]))
    assert clipped.all()


def test_a_second_clip_bounds_the_loss_of_bad_actions_alone():
    ratio, advantages = torch.tensor([5.0, 2.0, 5.0]), torch.tensor([-2.0, -2.0, 2.0])
    loss, _ = clipped_policy_loss(ratio, advantages, 0.2, 0.2)
    bounded, beyond = dual_clip(loss, advantages, 3.0)
    torch.testing.assert_close(loss, torch.tensor([10.0, 4.0, -2.4]))
    torch.testing.assert_close(bounded, torch.tensor([6.0, 4.0, -2.4]))
    assert beyond.tolist() == [True, False, False]


def test_cpgd_clips_the_log_prob_where_the_advantage_pushes_it_out():
    old = torch.full((4,), -1.0)
    logprobs = torch.tensor([-0.5, -0.5, -1.5, -1.5], requires_grad=True)
    loss, clipped = cpgd_loss(logprobs, old, torch.tensor([2.0, -2.0, 2.0, -2.0]), 0.2, 0.28)
    expected = [-2 * (-1 + 0.24686), 2 * -0.5, -2 * -1.5, 2 * (-1 - 0.22314)]  # ln 1.28, ln 0.8
    torch.testing.assert_close(loss, torch.tensor(expected), atol=1e-4, rtol=0)
    assert clipped.tolist() == [True, False, False, True]
    loss.sum().backward()
    assert logprobs.grad.tolist() == [0, 2, -2, 0]  # the log-prob's gradient, whatever the ratio


@pytest.mark.parametrize("clip_low", [1.0, 3.0])
def test_a_lower_bound_of_zero_or_less_bounds_nothing(clip_low):
    """A ratio is positive. The bound above stays."""
    old, logprobs = torch.full((3,), -1.0), torch.tensor([-50.0, -50.0, 0.0], requires_grad=True)
    advantages = torch.tensor([-2.0, 2.0, 2.0])
    loss, clipped = cpgd_loss(logprobs, old, advantages, clip_low, 0.28)
    torch.testing.assert_close(loss, torch.tensor([-100.0, 100.0, -2 * (-1 + 0.24686)]), atol=1e-4, rtol=0)
    assert clipped.tolist() == [False, False, True]
    loss.sum().backward()
    assert logprobs.grad.tolist() == [2, -2, 0]
    ratio = torch.tensor([1e-9, 5.0], requires_grad=True)
    loss, clipped = clipped_policy_loss(ratio, torch.tensor([-2.0, 2.0]), clip_low, 0.28)
    loss.sum().backward()
    assert clipped.tolist() == [False, True] and ratio.grad.tolist() == [2, 0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("level", ["token", "action", "chunk", "sequence"])
def test_ratios_that_would_overflow_stay_finite_and_so_do_their_gradients(level, sign):
    """Four tokens of 30 each: the chunk's sum is 120, whose exp is infinite in float32. The bound is e to 20."""
    log_ratio = torch.full((1, 4), 30.0 * sign, requires_grad=True)
    ratio = probability_ratio(log_ratio, level, TWO_STEPS, torch.tensor([120.0 * sign]))
    torch.testing.assert_close(ratio, torch.full((1, 4), 20.0 * sign).exp())
    for advantage in (1.0, -1.0):
        loss, _ = clipped_policy_loss(ratio, torch.tensor(advantage), 0.2, 0.28)
        (gradient,) = torch.autograd.grad(loss.sum(), log_ratio, retain_graph=True)
        assert loss.isfinite().all() and gradient.isfinite().all()


def test_the_bound_leaves_ordinary_ratios_alone_and_hides_no_nan():
    log_ratio = torch.tensor([[-19.0, -1.0, 1.0, 19.0]], requires_grad=True)
    ratio = probability_ratio(log_ratio, "token", TWO_STEPS)
    assert torch.equal(ratio, log_ratio.exp())
    (gradient,) = torch.autograd.grad(ratio.sum(), log_ratio)
    assert torch.equal(gradient, log_ratio.exp())
    assert probability_ratio(torch.tensor([[float("nan")]]), "chunk", torch.zeros(1, 1).long()).isnan().all()


def test_ratios_of_tokens_actions_and_chunks():
    log_ratio = torch.tensor([[0.1, 0.2, -0.4, 0.0]])
    torch.testing.assert_close(probability_ratio(log_ratio, "token", TWO_STEPS), log_ratio.exp())
    action = torch.tensor([[0.3, 0.3, -0.4, -0.4]]).exp()
    torch.testing.assert_close(probability_ratio(log_ratio, "action", TWO_STEPS), action)
    torch.testing.assert_close(probability_ratio(log_ratio, "chunk", TWO_STEPS), torch.full((1, 4), -0.1).exp())


def test_the_ratio_of_a_sequence_has_its_value_and_each_tokens_gradient():
    log_ratio = torch.tensor([[0.1, 0.2], [0.7, 0.0]], requires_grad=True)
    ratio = probability_ratio(log_ratio, "sequence", torch.tensor([[0, 1]] * 2), torch.tensor([0.5, -0.5]))
    torch.testing.assert_close(ratio, torch.tensor([[0.5, 0.5], [-0.5, -0.5]]).exp())
    ratio[0, 1].backward()
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[0.0, 1.6487213], [0.0, 0.0]]))  # e to 0.5


def test_the_ratio_of_a_sequence_without_its_mean_is_refused():
    with pytest.raises(ValueError, match="mean log-ratios of the trajectories"):
        probability_ratio(torch.zeros(1, 4), "sequence", TWO_STEPS)


def test_the_sum_of_a_step_is_that_of_its_elements_wherever_they_are():
    """Steps of unequal length, in any order: each row has its own."""
    x = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0]])
    step = torch.tensor([[0, 1, 1, 1], [2, 0, 2, 0]])
    assert step_sums(x, step).tolist() == [[1, 14, 14, 14], [5, 10, 5, 10]]


def test_clipped_value_loss_takes_the_worse_of_the_two():
    values, old, returns = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.9]), torch.tensor([1.0, 0.0])
    torch.testing.assert_close(value_loss(values, old, returns, 0.2), torch.tensor([0.32, 0.5]))
    torch.testing.assert_close(value_loss(values, old, returns, None), torch.tensor([0.0, 0.5]))


def test_bins_are_what_the_codec_decodes():
    assert Actor().bin_values().tolist() == [0.75, 0.75, 0.25, -0.25, -0.75]


def test_reconstruction_measures_the_expected_action_against_the_taken_one():
    bins = torch.tensor([1.0, 0.0, -1.0])
    logits = torch.tensor([[[0.6, 0.2, 0.2], [0.2, 0.2, 0.6]]]).log()
    loss = reconstruction_loss(logits, torch.tensor([[0, 1]]), bins, 1.0)
    torch.testing.assert_close(loss, torch.tensor([[(0.4 - 1) ** 2, 0.4**2]]))
    cold = reconstruction_loss(logits, torch.tensor([[0, 2]]), bins, 0.01)  # all on the most likely bin
    torch.testing.assert_close(cold, torch.zeros(1, 2))


def test_tokens_of_the_highest_entropy():
    entropies = torch.tensor([[0.1, 0.9, 0.5], [0.7, float("nan"), 9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert high_entropy_tokens(entropies, mask, 0.5).tolist() == [[False, True, False], [True, False, False]]
    assert high_entropy_tokens(entropies, mask, 0.01).tolist() == [[False, True, False], [False, False, False]]
    assert torch.equal(high_entropy_tokens(entropies, mask, 1.0), mask)
    assert not high_entropy_tokens(entropies, torch.zeros_like(mask), 0.5).any()


def test_an_empty_mask_sums_to_zero():
    assert float(masked_sum(torch.tensor([float("nan")]), torch.tensor([False]))) == 0.0
