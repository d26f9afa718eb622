"""Weights of stale tokens: where they go in every surrogate, and that they bring the gradient back on policy."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from fakes.decisions import annotated, annotated_update, no_inputs

from vlarl.algorithms.base import AlgorithmContext
from vlarl.algorithms.kl import k3
from vlarl.algorithms.surrogate import clipped_gradient, clipped_ratio
from vlarl.config.schema import AlgorithmConfig, KlConfig
from vlarl.decisions import TrainBatch
from vlarl.observability.metrics import WeightedMeans
from vlarl.policies.distribution import token_logprobs
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.policies.tiny import init_tiny
from vlarl.training.importance import corrects

# log-ratio of the learner to the engine -> weight under a cap of 2
WEIGHTS = {0.5: 1.6487213, 0.0: 1.0, -1.0: 0.3678794, 1.5: 2.0}
TRUNCATED = {"importance": "truncated"}


def learner_logprobs(policy, batch):
    ids = batch.decisions.sample.ids
    return token_logprobs(policy.score(batch.inputs, ids).logits, ids - policy.codec.first_id, 1.0)


def made_stale(policy, batch):
    """The batch as if an older policy had sampled it, and the weight of each token."""
    places = torch.arange(batch.mask.numel()).reshape(batch.mask.shape) % len(WEIGHTS)
    gaps, weights = (torch.tensor(list(column))[places] for column in (WEIGHTS.keys(), WEIGHTS.values()))
    with torch.no_grad():
        engine = learner_logprobs(policy, batch) - gaps
    stale = replace(batch.decisions, engine_logprobs=engine.masked_fill(~batch.mask, math.nan))
    return replace(batch, decisions=stale), weights


def first_gradient(learner, batch):
    """Of the policy, before anything has moved."""
    rows = torch.arange(len(batch))
    batch = learner._corrected(annotated(learner, batch, 1), WeightedMeans())
    learner._accumulate(learner._minibatch(batch, rows, moved=False), rows, True, True)
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None])


def gradient_of(loss, policy):
    for parameter in policy.parameters():
        parameter.grad = None
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def small_batch(advantages, sequence_log_ratio=None):
    ids, zeros = torch.zeros(advantages.shape, dtype=torch.int64), torch.zeros(advantages.shape)
    return TrainBatch(
        inputs=no_inputs(len(advantages)),
        decisions=token_decisions(ids, zeros, action_dim=3),
        old_logprobs=zeros,
        advantages=advantages,
        trajectory=torch.arange(len(advantages)),
        sequence_log_ratio=sequence_log_ratio,
    )


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        *((clipped_ratio, {"ratio_level": level}) for level in ("token", "action", "chunk", "sequence")),
        *((clipped_ratio, {"ratio_level": level, "dual_clip": 1.5}) for level in ("token", "chunk", "sequence")),
        (clipped_gradient, {"name": "cpgd"}),
    ],
)
def test_every_surrogate_and_its_gradient_are_in_proportion_to_the_advantage(objective, options):
    """So that a weight in the advantage is a weight of the surrogate, clipped or not."""
    generator = torch.Generator().manual_seed(0)
    shape = (40, 6)
    old, moves, advantages = (torch.randn(shape, generator=generator) for _ in range(3))
    weights = torch.rand(shape, generator=generator) * 2
    context = AlgorithmContext(AlgorithmConfig(**options), KlConfig(), 1.0)
    outcomes = []
    for inside, outside in ((weights, 1.0), (1.0, weights)):
        logprobs = (old + 0.5 * moves).requires_grad_()
        surrogate = objective(logprobs, old, small_batch(advantages * inside, moves.mean(dim=1)), context)
        loss = surrogate.loss * outside
        outcomes.append((loss.detach(), torch.autograd.grad(loss.sum(), logprobs)[0], surrogate.events))
    (loss, gradient, events), (by_hand, gradient_by_hand, events_before) = outcomes
    torch.testing.assert_close(loss, by_hand)
    torch.testing.assert_close(gradient, gradient_by_hand)
    for name, event in events.items():
        assert torch.equal(event, events_before[name]) and 0.02 < float(event.float().mean()) < 0.9, name


def test_the_drift_of_cpgd_is_not_weighted():
    logprobs, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    context = AlgorithmContext(AlgorithmConfig(name="cpgd", policy_drift_coef=0.3), KlConfig(), 1.0)
    nothing_to_gain = clipped_gradient(logprobs, old, small_batch(torch.zeros(1, 2)), context)
    torch.testing.assert_close(nothing_to_gain.loss, 0.3 * k3(old, logprobs))


CASES = {
    "grpo": {"name": "grpo"},
    "dual clip": {"name": "grpo", "dual_clip": 3.0},
    "reinforce": {"name": "reinforce"},
    "cpgd": {"name": "cpgd"},
    "sequence": {"name": "grpo", "ratio_level": "sequence"},
    "chunk": {"name": "grpo", "ratio_level": "chunk"},
    "ppo": {"name": "ppo", "critic_hidden": (16,), "gae_level": "token"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_the_weighted_one_of_the_log_probs(act, learner_batch, configure, build, case):
    """At a ratio of 1 it is -A w times the gradient of log pi, with weights by hand; the cap is hit by every fourth."""
    policy = init_tiny("parallel", seed=3)
    learner = build(policy, configure(algorithm=CASES[case] | TRUNCATED, critic={"kind": "separate"}))
    batch, weights = made_stale(policy, learner_batch(learner, act(policy)))
    assert not batch.mask.all()
    if case == "chunk":  # tokens that share a ratio share the mean of their weights
        weights = torch.where(batch.mask, weights, 0.0).sum(dim=1, keepdim=True)  # each of as many: their mean
    gradient = first_gradient(learner, batch)
    logprobs = learner_logprobs(policy, batch)
    by_hand = (-batch.advantages * weights * logprobs)[batch.mask].mean()
    expected = gradient_of(by_hand, policy)
    assert float(expected.norm()) > 0.1
    assert float((gradient - expected).norm()) < 1e-5 * float(expected.norm())


def test_the_update_reports_how_stale_tokens_were_weighted(policy, act, policy_batch, configure, build):
    batch, weights = made_stale(policy, policy_batch(policy, act(policy)))
    config = configure(algorithm=TRUNCATED | {"epochs": 1}, optim={"microbatch_size": 4})
    metrics = annotated_update(build(policy, config), batch, 1).metrics
    executed = weights[batch.mask]
    assert metrics["importance_mean"] == pytest.approx(float(executed.mean()), rel=1e-5)
    assert metrics["importance_capped"] == pytest.approx(float((executed == 2).float().mean()), rel=1e-6)
    assert metrics["importance_capped"] > 0.1
    assert metrics["policy_loss"] == pytest.approx(float(-(batch.advantages * weights)[batch.mask].mean()), rel=1e-4)
    assert metrics["engine_logprob_error"] == pytest.approx(1.5, abs=1e-4)
    assert metrics["ratio_first_minibatch_error"] == 0.0, "the ratio starts at the learner, stale or not"


@pytest.mark.parametrize("importance", ["none", "auto"])
def test_without_the_correction_the_engines_log_probs_change_nothing(act, policy_batch, configure, build, importance):
    """To the last bit; and `auto` is none where rollouts wait for updates."""
    after = []
    for stale in (False, True):
        policy = init_tiny("parallel", seed=3)
        batch = policy_batch(policy, act(policy))
        batch = made_stale(policy, batch)[0] if stale else batch
        config = configure(algorithm={"importance": importance}, optim={"lr": 1e-3, "minibatches": 2})
        metrics = annotated_update(build(policy, config), batch, 1).metrics
        assert not any(name.startswith("importance") for name in metrics)
        engine = {name: metrics.pop(name) for name in ("engine_mismatch_kl", "engine_logprob_error")}
        assert (engine["engine_logprob_error"] > 1) == stale
        after.append((metrics, torch.cat([p.detach().flatten() for p in policy.parameters()])))
    assert after[0][0] == after[1][0]
    assert torch.equal(after[0][1], after[1][1])


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_what_the_policy_itself_sampled_has_weight_one(policy, act, policy_batch, configure, build, temperature):
    config = configure(rollout={"temperature": temperature}, algorithm=TRUNCATED)
    batch = policy_batch(policy, act(policy, temperature))
    metrics, learner = WeightedMeans(), build(policy, config)
    weighted = learner._corrected(annotated(learner, batch, 1), metrics)
    executed = batch.mask
    torch.testing.assert_close(weighted.advantages[executed], batch.advantages[executed], rtol=1e-5, atol=0)
    reduced = metrics.reduce()
    assert reduced["importance_mean"] == pytest.approx(1.0, abs=1e-5)
    assert reduced["importance_capped"] == 0.0


@pytest.mark.parametrize(
    ("noise", "num_capped", "remaining"),
    [
        (0.02, (0.001, 0.01), 0.1),  # a KL of 0.03 from the sampler: as stale as an update makes it
        (0.08, (0.05, 0.2), 1.0),  # a KL of 0.5: the cap bites, and some bias stays
    ],
)
def test_the_expected_gradient_on_stale_data_comes_back_to_the_one_on_policy(
    observation, configure, build, noise, num_capped, remaining
):
    """Expectations are exact: tokens of a parallel policy are independent, so one row for each bin holds them all.

    `num_capped`: bounds of the fraction of tokens at the cap; `remaining`: of the distance that the correction may leave.
    """
    sampler = init_tiny("parallel", seed=3, chunk_length=1)
    policy = copy.deepcopy(sampler).requires_grad_(False)
    head = policy.model.language_model.lm_head.weight.requires_grad_()
    with torch.no_grad():
        head.add_(noise * torch.randn(head.shape, generator=torch.Generator().manual_seed(5)))
    num_bins, num_tokens = policy.codec.num_bins, policy.chunk_length * policy.action_dim
    places = torch.arange(num_bins)[:, None].expand(num_bins, num_tokens).contiguous()
    ids = places + policy.codec.first_id
    inputs = policy.process([observation(1, "open the drawer")] * num_bins)
    gains = torch.linspace(-1, 1, num_bins) ** 3 + 0.2  # the advantage of each bin
    with torch.no_grad():
        engine = token_logprobs(sampler.score(inputs, ids).logits, places, 1.0)
    batch = TrainBatch(
        inputs=inputs,
        decisions=token_decisions(ids, engine, policy.action_dim),
        advantages=gains[:, None] * engine.exp() * num_bins,  # a row counts as often as its tokens were sampled
        trajectory=torch.arange(num_bins),
    )
    probabilities = policy.score(inputs.rows(slice(0, 1)), ids[:1]).logits.softmax(dim=-1)
    on_policy = gradient_of(-(probabilities * gains).sum(dim=-1).mean(), policy)

    def distance(**options) -> float:
        config = configure(algorithm=options, optim={"microbatch_size": num_bins})
        gradient = first_gradient(build(policy, config), batch)
        return float((gradient - on_policy).norm() / on_policy.norm())

    uncorrected = distance(importance="none")
    ratio = (learner_logprobs(policy, batch).detach() - engine).exp()
    assert num_capped[0] < float((engine.exp() * (ratio > 2)).sum(dim=0).mean()) < num_capped[1]
    assert uncorrected > 0.1
    assert distance(importance="truncated") < remaining * uncorrected
    assert distance(importance="truncated", importance_cap=1e6) < 1e-4


@pytest.mark.parametrize(
    ("importance", "old_logprobs", "asynchronous", "expected"),
    [
        ("auto", "learner", True, True),
        ("auto", "learner", False, False),
        ("auto", "engine", True, False),
        ("none", "learner", True, False),
        ("truncated", "learner", False, True),
    ],
)
def test_when_tokens_are_weighted(configure, importance, old_logprobs, asynchronous, expected):
    config = configure(
        algorithm={"importance": importance, "old_logprobs": old_logprobs}, distributed={"asynchronous": asynchronous}
    )
    assert corrects(config) is expected
