"""The gate before any training of a flow policy: five properties without which RL would train something else.

ODE       at temperature 0 its actions are the original's (lerobot's, as golden arrays)
density   its log-prob is that of the samples, as their frequencies tell
score     the gradient of the log-prob has mean zero
ratio     the first minibatch has the ratio 1 (see tests/e2e/test_smolvla_training.py, too)
constant  a constant reward moves nothing (tests/e2e/test_smolvla_training.py)
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.smolvla import FOLDER, seen, smolvla

from vlarl.decisions import Decisions, Sampling
from vlarl.policies.smolvla.inputs import SmolVLAInputs
from vlarl.policies.smolvla.policy import SmolVLAPolicy
from vlarl.rollout.engines.torch import TorchEngine

KINDS = ("sde", "cps", "noise")
ROWS = 1000


def repeated(policy: SmolVLAPolicy, rows: int) -> SmolVLAInputs:
    return policy.process([seen(0)]).rows(torch.zeros(rows, dtype=torch.int64))


def chains_from_one_start(policy: SmolVLAPolicy, inputs: SmolVLAInputs) -> Decisions:
    """Decisions whose stochastic step begins at one state, with noise of their own."""
    noise = policy.noise(range(len(inputs)), Sampling(1.0))
    half = (noise.shape[1] - 1) // 2
    noise[:, :half] = noise[:1, :half]
    return policy.sample(inputs, noise, Sampling(1.0))


def test_the_ode_acts_as_the_original_does():
    policy = smolvla(chunk_length=None)
    with np.load(FOLDER / "expected.npz") as arrays:
        expected = {name: arrays[name] for name in ("noise", "actions", "tokens", "token_mask", "state_normalized")}
        views = np.stack([arrays[f"raw/{view}"] for view in policy.config.views], axis=1)
    state = np.pad(expected["state_normalized"], ((0, 0), (0, policy.config.max_state_dim - policy.config.state_dim)))
    columns = (expected["tokens"], expected["token_mask"], views, state)
    start = torch.from_numpy(expected["noise"]).flatten(1)
    rows = torch.cat([start, torch.randn_like(start), torch.rand(len(start), 1)], dim=1)
    decisions = policy.sample(SmolVLAInputs(*map(torch.from_numpy, columns)), rows, Sampling(0.0))
    np.testing.assert_allclose(np.stack(policy.act(decisions)), expected["actions"], atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_prob_is_the_density_of_the_samples(kind):
    """How often samples fall into a window around one of them, against the integral of exp(log-prob) over it."""
    policy = smolvla(noise=kind, steps=3, stochastic_step=1)
    inputs = repeated(policy, ROWS)
    decisions = chains_from_one_start(policy, inputs)
    after, width = decisions.sample.after, 0.1
    points = torch.linspace(-width, width, 9)
    weights = torch.tensor([1, 4, 2, 4, 2, 4, 2, 4, 1.0]) * (points[1] - points[0]) / 3  # Simpson's rule
    centre, few = after[:1], len(points)
    moved = replace(decisions.rows(slice(0, few)).sample, after=centre + points.view(-1, 1, 1))
    with torch.no_grad():
        probes = replace(decisions.rows(slice(0, few)), sample=moved)
        density = policy.evaluate(inputs.rows(slice(0, few)), probes, 1.0).logprobs.exp()
    expected = (weights[:, None] * density).sum(dim=0)  # [L]
    values, own = policy._executed(after[1:]), policy._executed(centre)
    found = ((values - own).abs() < width).float().mean(dim=0)
    error = (expected * (1 - expected) / (ROWS - 1)).sqrt()
    assert ((found - expected).abs() < 5 * error + 1e-4).all()
    assert expected.max() > 0.05, "the window is wide enough for its frequency to be measured"
    # Elements are independent given the state before, so the log-prob of a chunk is their sum.
    correlation = torch.corrcoef(values.T).fill_diagonal_(0)
    assert correlation.abs().max() < 6 / ROWS**0.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_has_mean_zero(kind):
    """Over many samples the mean gradient of the log-prob is within its standard error, for every weight looked at."""
    policy = smolvla(noise=kind, steps=3)
    batches, rows = 40, 6
    watched = [policy.model.action_out_proj.bias, policy.model.action_in_proj.weight, policy.model.state_proj.bias]
    if policy.noise_head is not None:
        watched.append(policy.noise_head.out.bias)
    inputs, scores = repeated(policy, rows), []
    for batch in range(batches):
        seeds = range(batch * rows, (batch + 1) * rows)
        decisions = policy.sample(inputs, policy.noise(seeds, Sampling(1.0)), Sampling(1.0))
        logprob = policy.evaluate(inputs, decisions, 1.0).logprobs.sum() / rows
        scores.append(torch.cat([g.flatten() for g in torch.autograd.grad(logprob, watched)]))
    stacked = torch.stack(scores)
    mean, error = stacked.mean(dim=0), stacked.std(dim=0) / batches**0.5
    read = error > 1e-6  # padded dimensions have no score
    assert read.sum() > 50
    assert (mean[read].abs() / error[read]).max() < 5.5, "no weight is moved on average"
    assert 0.5 < (mean[read] / error[read]).std() < 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_ratio_is_one_whatever_the_microbatch(kind):
    policy = smolvla(noise=kind)
    inputs = policy.process([seen(i) for i in range(12)])
    decisions = TorchEngine(policy, torch.device("cpu")).generate(inputs, Sampling(1.0), range(12))
    with torch.no_grad():
        for size in (12, 5, 1):
            parts = [slice(i, i + size) for i in range(0, 12, size)]
            logprobs = torch.cat([policy.evaluate(inputs.rows(p), decisions.rows(p), 1.0).logprobs for p in parts])
            ratio = (logprobs - decisions.engine_logprobs).exp()
            torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)
