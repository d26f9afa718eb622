"""Stochastic denoising on fields whose answers are known."""

import math

import numpy as np
import pytest
import torch

from vlarl.policies.flow import Denoising, NoiseHead, denoise, gaussian_entropy, gaussian_logprobs

KINDS = ("sde", "cps", "noise")
TARGET = 0.7
LEARNED = 0.12


def straight(x: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The field that leads every state straight to TARGET, and a constant learned std."""
    return (x - TARGET) / times.view(-1, 1, 1), torch.full_like(x, LEARNED)


def chain(denoising: Denoising, rows: int = 6, temperature: float = 1.0, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start, noise = torch.randn(2, rows, 3, 2, generator=generator, dtype=torch.float64)
    index = denoising.chosen(torch.rand(rows, generator=generator))
    found = denoise(straight, start, noise, index, denoising, temperature)
    return {"start": start, "noise": noise, "index": index, **vars(found)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [2, 5])
def test_at_temperature_zero_the_chain_is_the_ode(kind, num_steps):
    found = chain(Denoising(num_steps, kind), temperature=0.0)
    torch.testing.assert_close(found["end"], torch.full_like(found["end"], TARGET), atol=1e-6, rtol=0)
    # On a straight path the state at time t is t * noise + (1 - t) * target.
    for row, index in enumerate(found["index"].tolist()):
        for state, at in (("before", index), ("after", index + 1)):
            time = 1 - at / num_steps
            expected = time * found["start"][row] + (1 - time) * TARGET
            torch.testing.assert_close(found[state][row], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kept_step_is_the_one_that_was_sampled(kind):
    denoising, temperature = Denoising(5, kind), 1.3
    found = chain(denoising, rows=40, temperature=temperature)
    assert set(found["index"].tolist()) == set(range(denoising.num_choices)), "every step has its turn"
    velocity, learned = straight(found["before"], denoising.times(found["index"]))
    mean, std = denoising.gaussian(found["before"], velocity, found["index"], learned)
    torch.testing.assert_close(found["after"], mean + temperature * std * found["noise"], atol=1e-6, rtol=0)
    torch.testing.assert_close(found["mean"], mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(found["std"], std.expand_as(mean), atol=1e-6, rtol=0)
    # What follows is the ODE: a straight field ends at its target from wherever the noise led, unless nothing follows.
    last = found["index"] == denoising.num_steps - 1
    torch.testing.assert_close(found["end"][~last], torch.full_like(found["end"][~last], TARGET), atol=1e-5, rtol=0)
    assert torch.equal(found["end"][last], found["after"][last])


def test_only_one_step_is_stochastic():
    """Two chains with the same start and other noise agree up to the stochastic step."""
    denoising = Denoising(6, "sde", step=3)
    start, first, second = torch.randn(3, 4, 3, 2, generator=torch.Generator().manual_seed(1))
    index = denoising.chosen(torch.zeros(4))
    assert index.tolist() == [3] * 4
    one, other = (denoise(straight, start, noise, index, denoising, 1.0) for noise in (first, second))
    assert torch.equal(one.before, other.before) and not torch.isclose(one.after, other.after).any()


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_the_marginals_of_the_flow_are_kept(kind):
    """Actions from N(m, s^2): the exact field is linear, and after a stochastic step from the exact marginal at t the
    state has the moments of the marginal at the next time, up to the step's size."""
    m, s, rows, num_steps = 0.4, 0.5, 200_000, 50
    generator = torch.Generator().manual_seed(2)
    denoising = Denoising(num_steps, kind, 0.5)
    for k in (10, 25, 40):
        time, following = 1 - k / num_steps, 1 - (k + 1) / num_steps
        std = math.hypot((1 - time) * s, time)
        x = (1 - time) * m + std * torch.randn(rows, 1, 1, generator=generator, dtype=torch.float64)
        # E[noise - action | x] of a Gaussian action and a Gaussian noise
        velocity = (time - (1 - time) * s**2) / std**2 * (x - (1 - time) * m) - m
        mean, sigma = denoising.gaussian(x, velocity, torch.full((rows,), k))
        after = mean + sigma * torch.randn(rows, 1, 1, generator=generator, dtype=torch.float64)
        assert after.mean().item() == pytest.approx((1 - following) * m, abs=6e-3)
        if kind == "sde":  # the SDE of the flow has its marginals; CPS keeps the level of the noise alone
            assert after.std().item() == pytest.approx(math.hypot((1 - following) * s, following), rel=0.02)


def test_log_probs_and_entropies_are_those_of_torchs_gaussian():
    generator = torch.Generator().manual_seed(3)
    x, mean = torch.randn(2, 4, 3, 2, generator=generator, dtype=torch.float64)
    std = torch.rand(4, 3, 2, generator=generator, dtype=torch.float64) + 0.1
    known = torch.distributions.Normal(mean, std)
    torch.testing.assert_close(gaussian_logprobs(x, mean, std), known.log_prob(x))
    torch.testing.assert_close(gaussian_entropy(std), known.entropy())


def test_a_sample_is_a_constant_of_its_score():
    x = torch.zeros(1, 1, 1, requires_grad=True)
    mean = torch.ones(1, 1, 1, requires_grad=True)
    gaussian_logprobs(x, mean, torch.full((1, 1, 1), 0.5)).sum().backward()
    assert x.grad is None and mean.grad.item() == pytest.approx(-1 / 0.25)


def test_a_learned_std_starts_in_the_middle_and_stays_between_its_bounds():
    head = NoiseHead(4, 3)
    states = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head(states, 0.05, 0.2), torch.full((2, 5, 3), 0.1))
    for weight, bound in ((1e4, 0.2), (-1e4, 0.05)):
        torch.nn.init.constant_(head.out.bias, weight)
        torch.testing.assert_close(head(states, 0.05, 0.2), torch.full((2, 5, 3), bound))


def test_the_time_grid_begins_at_one_and_has_equal_steps():
    grid = Denoising(10).times(torch.arange(10))
    np.testing.assert_allclose(grid, np.linspace(1.0, 0.1, 10), atol=1e-7)


def test_steps_that_can_not_be_stochastic_are_refused():
    with pytest.raises(ValueError, match="the stochastic step 4 is not one of the steps that can be: 0 to 3 of 5"):
        Denoising(5, "cps", step=4)
    with pytest.raises(ValueError, match="its last step has no noise; take 2 steps"):
        Denoising(1, "cps")
    assert Denoising(5, "sde", step=4).step == 4
