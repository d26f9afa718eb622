"""The metrics of an update: results worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from fakes.decisions import annotated_update, no_inputs

from vlarl.decisions import TrainBatch
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.policies.tiny import init_tiny
from vlarl.training.update_metrics import MetricSums, explained_variance, is_finite, mean_of, mismatch


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], 1.0),
        ([2.5, 2.5, 2.5, 2.5], 0.0),  # no more than the mean
        ([9.0, 9.0, 9.0, 9.0], 0.0),  # nor less: a constant error has no variance
        ([2.0, 2.0, 3.0, 3.0], 0.6),  # errors -1, 0, 0, 1: a variance of 2/3, of 5/3
        ([4.0, 3.0, 2.0, 1.0], -3.0),  # errors -3, -1, 1, 3: four times the variance
    ],
)
def test_explained_variance_by_hand(values, expected):
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(returns, torch.tensor(values)) == pytest.approx(expected, abs=1e-6)


def test_explained_variance_of_too_little():
    nothing, one = torch.zeros(0), torch.ones(1)
    assert math.isnan(explained_variance(nothing, nothing)) and math.isnan(explained_variance(one, one))
    assert math.isnan(explained_variance(torch.ones(3), torch.zeros(3)))


def test_the_update_reports_the_explained_variance_of_executed_steps(act, learner_batch, configure, build):
    """Half of the returns is foreseen: a quarter of their variance is left. Steps that never ran are absurd."""
    policy = init_tiny("parallel", seed=3, chunk_length=2)
    algorithm = {"name": "ppo", "critic_hidden": (16,), "gae_level": "step", "epochs": 1}
    learner = build(policy, configure(algorithm=algorithm))
    batch = learner_batch(learner, act(policy))
    half = torch.where(batch.value_mask, batch.returns / 2, 99.0)
    assert not batch.value_mask.all()
    metrics = annotated_update(learner, replace(batch, old_values=half), 1).metrics
    assert metrics["explained_variance"] == pytest.approx(0.75, abs=1e-5)


def test_the_mismatch_is_the_divergence_of_the_learner_from_the_engine_that_sampled():
    """KL(engine || learner): ten tokens, sampled as often as the engine's probabilities say. The reverse differs."""
    engine, learner = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.3, 0.6])
    places = torch.tensor([[0] * 7 + [1] * 2 + [2]])
    decisions = token_decisions(places, engine.log()[places], action_dim=5)
    batch = TrainBatch(inputs=no_inputs(), decisions=decisions, trajectory=torch.zeros(1, dtype=torch.int64))
    found = mismatch(batch, learner.log()[places])
    expected, reverse = (float((p * (p / q).log()).sum()) for p, q in ((engine, learner), (learner, engine)))
    assert mean_of([found], "engine_mismatch_kl") == pytest.approx(expected, abs=1e-5)
    assert abs(expected - reverse) > 0.05
    assert found.maxima["engine_logprob_error"] == pytest.approx(math.log(7), abs=1e-5)


def test_means_and_finiteness_of_a_minibatch():
    first, second = MetricSums({"approx_kl": (3.0, 2)}, loss=1.0), MetricSums({"approx_kl": (1.0, 6)}, loss=2.0)
    assert mean_of([first, second], "approx_kl") == 0.5
    assert mean_of([MetricSums({"approx_kl": (0.0, 0)})], "approx_kl") == 0.0
    assert is_finite([first, second])
    assert not is_finite([first, replace(second, loss=math.inf)])
    assert not is_finite([replace(first, sums={"approx_kl": (math.nan, 2)}), second])
