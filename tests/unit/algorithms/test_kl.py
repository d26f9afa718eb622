"""KL estimators on known distributions, and the coefficient's way."""

import math

import pytest
import torch

from vlarl.algorithms.kl import ESTIMATORS, AdaptiveKl, FixedKl, build_kl_controller, k1, k2, k3
from vlarl.config.schema import KlConfig


def test_estimators_by_hand():
    policy, reference = torch.tensor([0.0, -1.0]), torch.tensor([-0.5, -0.2])
    torch.testing.assert_close(k1(policy, reference), torch.tensor([0.5, -0.8]))
    torch.testing.assert_close(k2(policy, reference), torch.tensor([0.125, 0.32]))
    expected = torch.tensor([math.exp(-0.5) + 0.5 - 1, math.exp(0.8) - 0.8 - 1])
    torch.testing.assert_close(k3(policy, reference), expected)


def test_k3_is_zero_at_equality_and_never_negative():
    x = torch.linspace(-3, 3, 31)
    assert float(k3(x, x).abs().max()) == 0
    assert (k3(torch.zeros_like(x), x) >= 0).all()
    assert float(k3(torch.tensor(0.0), torch.tensor(1.0))) == pytest.approx(2.718281828 - 2, abs=1e-6)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_average_to_the_true_divergence(name):
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.5, 0.3]).log()
    truth = float((policy.exp() * (policy - reference)).sum())
    assert float((policy.exp() * ESTIMATORS[name](policy, reference)).sum()) == pytest.approx(truth, abs=1e-6)


def test_in_expectation_the_gradient_of_k1_is_nothing_and_that_of_k2_is_the_divergences():
    """Why k1 is refused in the loss: over the policy's own samples, it would only pretend to hold it back."""
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3]).log()
    logprobs = logits.log_softmax(-1)
    weights = logprobs.detach().exp()
    (of_k1,) = torch.autograd.grad((weights * k1(logprobs, reference)).sum(), logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((weights * k2(logprobs, reference)).sum(), logits, retain_graph=True)
    (truth,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    torch.testing.assert_close(of_k1, torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(of_k2, truth, atol=1e-6, rtol=0)


def test_a_fixed_coefficient_stays():
    controller = build_kl_controller(KlConfig(coef=0.1))
    controller.update(100.0, 1000)
    assert type(controller) is FixedKl and controller.coef == 0.1


def test_an_adaptive_coefficient_follows_the_error_up_to_a_fifth_of_the_target():
    controller = build_kl_controller(KlConfig(coef=0.1, target=2.0, horizon=1000))
    assert isinstance(controller, AdaptiveKl)
    controller.update(2.2, 100)  # 10% above, over a tenth of the horizon
    assert controller.coef == pytest.approx(0.1 * 1.01)
    controller.update(2.0, 100)
    assert controller.coef == pytest.approx(0.1 * 1.01)
    controller.update(50.0, 100)  # counts as 20% above
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(0.0, 500)  # and 20% below
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.02 * 0.9)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_divergence_that_is_not_finite_leaves_the_coefficient_alone(kl):
    controller = AdaptiveKl(0.1, target=2.0, horizon=1000)
    controller.update(kl, 100)
    assert controller.coef == 0.1
    controller.update(2.2, 100)
    assert controller.coef == pytest.approx(0.1 * 1.01)


def test_the_coefficient_stays_positive_however_many_episodes_an_update_has():
    controller = AdaptiveKl(0.1, target=2.0, horizon=10)
    controller.update(0.0, 1000)  # a hundred horizons: counts as one
    assert controller.coef == pytest.approx(0.1 * 0.8)
    controller.update(9.0, 1000)
    assert controller.coef == pytest.approx(0.1 * 0.8 * 1.2)


def test_k3_is_clamped_as_in_verl_and_its_gradient_stays_finite():
    """d: log-prob of the reference minus the policy's. exp(2.5) - 2.5 - 1 = 8.68 is below 10, exp(3) - 3 - 1 above."""
    d = torch.tensor([-200.0, -2.0, 2.5, 3.0, 200.0])
    policy = torch.zeros(5, requires_grad=True)
    kl = k3(policy, d)
    expected = [10.0, math.exp(-2) + 2 - 1, math.exp(2.5) - 2.5 - 1, 10.0, 10.0]  # at -20: 19, hence 10
    torch.testing.assert_close(kl, torch.tensor(expected))
    kl.sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([0.0, 1 - math.exp(-2), 1 - math.exp(2.5), 0.0, 0.0]))
