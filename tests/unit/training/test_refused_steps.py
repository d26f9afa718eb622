"""Minibatches that are not finite: refused as a whole, counted, and seen by nothing that lasts."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from fakes.decisions import annotated, annotated_update, nothing

from vlarl.policies.tiny import init_tiny

ADAPTIVE = {"coef": 0.1, "target": 1e-6, "horizon": 100}


@pytest.fixture
def tiny():
    return init_tiny("parallel", seed=3, chunk_length=2)


def with_reference(learner, batch, iteration=1, shift=0.5):
    """Annotated, as if the reference found each token less likely by `shift`: k2 is shift squared over 2."""
    batch = annotated(learner, batch, iteration)
    return replace(batch, ref_logprobs=batch.decisions.engine_logprobs - shift)


def without_a_finite_reference(learner, batch):
    batch = annotated(learner, batch, 1)
    return replace(batch, ref_logprobs=torch.full_like(batch.mask, math.nan, dtype=torch.float32))


def with_engine(batch, logprobs):
    """The batch as if the engine had found these log-probs."""
    return replace(batch, decisions=replace(batch.decisions, engine_logprobs=logprobs))


def spoilt(batch, row=0, value=math.nan):
    """One decision with a reward that overflowed, say."""
    advantages = batch.advantages.clone()
    advantages[row] = value
    return replace(batch, advantages=advantages)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_minibatch_does_not_reach_the_kl_controller(tiny, act, policy_batch, configure, build, value):
    """Its KL is left out of the mean that drives the coefficient: as if there had been only the other minibatch."""
    config = configure(kl=ADAPTIVE, optim={"minibatches": 2, "lr": 0.0}, algorithm={"epochs": 1})
    learner = build(tiny, config)
    batch = with_reference(learner, policy_batch(tiny, act(tiny, lengths=(2, 2))))
    rows = learner._schedule(batch, 1)
    reference = batch.ref_logprobs.clone()
    reference[rows[0]] -= 7.0  # of the refused one: 7.5 off
    broken = spoilt(replace(batch, ref_logprobs=reference), int(rows[0][0]), value)
    result = learner.update(broken, 1, nothing)
    assert (result.num_optimizer_steps, result.num_skipped_steps) == (1, 1)
    assert result.metrics["kl_ref"] == pytest.approx(0.5**2 / 2, rel=1e-3)
    assert learner.kl.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 100))  # far above the target; two episodes
    finite = {name: number for name, number in result.metrics.items() if not math.isfinite(number)}
    assert finite == {}, "what was refused is counted, and not in the means"


def test_when_all_minibatches_are_broken_the_coefficient_stays(tiny, act, policy_batch, configure, build):
    learner = build(tiny, configure(kl=ADAPTIVE, ema={"beta": 0.5}, optim={"lr": 1e-2}))
    averages = {name: weight.clone() for name, weight in learner.average.weights.items()}
    batch = policy_batch(tiny, act(tiny))
    result = learner.update(without_a_finite_reference(learner, batch), 1, nothing)
    assert (result.num_optimizer_steps, result.num_skipped_steps) == (0, 2)
    assert (learner.version, learner.policy_updates) == (0, 0), "an update without a step did not happen"
    assert learner.kl.coef == 0.1 and "kl_ref" not in result.metrics
    assert all(torch.equal(learner.average.weights[name], averages[name]) for name in averages)
    learner.update(with_reference(learner, batch, 2), 2, nothing)
    assert math.isfinite(learner.kl.coef) and learner.kl.coef != 0.1
    assert any(not torch.equal(learner.average.weights[name], averages[name]) for name in averages)


def test_a_kl_that_is_measured_only_and_not_finite_is_shown_and_steers_nothing(
    tiny, act, policy_batch, configure, build
):
    """In the reward, the KL is not part of the loss: the step is taken, and the metric shows the value."""
    learner = build(tiny, configure(kl=ADAPTIVE | {"place": "reward"}))
    batch = policy_batch(tiny, act(tiny))
    result = learner.update(without_a_finite_reference(learner, batch), 1, nothing)
    assert result.num_skipped_steps == 0 and math.isnan(result.metrics["kl_ref"])
    assert learner.kl.coef == 0.1


def clipped_away(batch, row=0):
    """An infinite advantage where CPGD's clip has ended the gradient already: the loss is infinite, the gradient not."""
    old = batch.decisions.engine_logprobs.clone()
    old[row] -= 1.0  # a ratio of e, beyond 1 + clip_high
    return spoilt(with_engine(batch, old), row, math.inf)


def test_a_loss_that_is_not_finite_is_refused_though_its_gradient_is(tiny, act, policy_batch, configure, build):
    config = configure(
        algorithm={"name": "cpgd", "old_logprobs": "engine", "epochs": 1}, optim={"lr": 1e-2}, ema={"beta": 0.5}
    )
    learner, start = build(tiny, config), copy.deepcopy(tiny.state_dict())
    batch = policy_batch(tiny, act(tiny))
    result = annotated_update(learner, clipped_away(batch), 1)
    gradients = [p.grad for p in tiny.parameters() if p.grad is not None]
    assert gradients and all(g.isfinite().all() for g in gradients), "the norm alone would have let it pass"
    assert (result.num_optimizer_steps, result.num_skipped_steps) == (0, 1)
    assert all(torch.equal(weight, start[name]) for name, weight in tiny.state_dict().items())
    assert not learner.optimizer.state
    assert annotated_update(learner, batch, 2).num_optimizer_steps == 1


def test_a_broken_minibatch_neither_stops_the_update_nor_counts_for_the_kl_limit(
    tiny, act, policy_batch, configure, build
):
    """NaN compares false with every limit: it is refused, and the next minibatch is trained on."""
    limits = {"max_approx_kl": 0.1, "old_logprobs": "engine", "epochs": 1}
    learner = build(tiny, configure(algorithm=limits, optim={"minibatches": 2}))
    batch = policy_batch(tiny, act(tiny, lengths=(2, 2)))
    old = batch.decisions.engine_logprobs.clone()
    old[learner._schedule(batch, 1)[0][0]] = math.nan
    result = annotated_update(learner, with_engine(batch, old), 1)
    assert not result.stopped_early
    assert (result.num_optimizer_steps, result.num_skipped_steps) == (1, 1)
    assert 0 <= result.metrics["approx_kl"] < 1e-6
    assert result.metrics["ratio_first_minibatch_error"] < 1e-5, "of the first that was taken: nothing had moved"


def test_while_the_critic_warms_up_a_policy_that_is_not_finite_is_refused(tiny, act, learner_batch, configure, build):
    """The value loss is finite, and the policy's log-probs are not: they must not be trained on."""
    algorithm = {"name": "ppo", "critic_hidden": (16,), "value_init_steps": 1, "old_logprobs": "engine", "epochs": 1}
    learner = build(tiny, configure(algorithm=algorithm))
    batch = learner_batch(learner, act(tiny))
    broken = with_engine(batch, torch.full_like(batch.decisions.engine_logprobs, math.nan))
    assert annotated_update(learner, broken, 1).num_skipped_steps == 1


def test_a_gradient_that_is_not_finite_is_refused_though_its_loss_is(tiny, act, policy_batch, configure, build):
    """A weight whose gradient overflows on its way, as it does in smaller types."""
    learner, start = (
        build(tiny, configure(algorithm={"epochs": 1}, optim={"lr": 1e-2})),
        copy.deepcopy(tiny.state_dict()),
    )
    head = tiny.model.language_model.lm_head.weight
    hook = head.register_hook(lambda gradient: gradient * math.inf)
    batch = policy_batch(tiny, act(tiny))
    result = annotated_update(learner, batch, 1)
    hook.remove()
    assert (result.num_optimizer_steps, result.num_skipped_steps) == (0, 1)
    assert all(torch.equal(weight, start[name]) for name, weight in tiny.state_dict().items())
    assert "policy_loss" not in result.metrics and "grad_norm" not in result.metrics
    assert annotated_update(learner, batch, 2).num_optimizer_steps == 1
