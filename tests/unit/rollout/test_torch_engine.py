"""The torch engine: its log-probs, its versions, its weights."""

import pytest
import torch
from fakes.float_error import check_logprobs

from vlarl.decisions import Sampling
from vlarl.errors import UsageError, VlarlError
from vlarl.policies.tiny import init_tiny
from vlarl.rollout.engines.torch import TorchEngine

CPU = torch.device("cpu")


def test_rows_are_the_same_however_few_are_decoded_at_a_time(observation):
    """Each pass of `batch_size` rows uses its own rows' seeds."""
    policy = init_tiny("parallel", seed=1)
    inputs = policy.process([observation(i) for i in range(5)])
    seeds = [50, 51, 52, 53, 54]
    together = TorchEngine(policy, CPU).generate(inputs, Sampling(1.0), seeds)
    for size in (1, 2, 5):
        apart = TorchEngine(policy, CPU, batch_size=size).generate(inputs, Sampling(1.0), seeds)
        assert torch.equal(apart.sample.ids, together.sample.ids)
        assert apart.engine_logprobs.shape == together.engine_logprobs.shape


def test_greedy_ignores_the_seed_and_reports_probabilities_at_temperature_one(observation):
    policy = init_tiny("parallel", seed=1)
    inputs = policy.process([observation(0), observation(1)])
    engine = TorchEngine(policy, CPU)
    one, two = engine.generate(inputs, Sampling(0.0), [1, 2]), engine.generate(inputs, Sampling(0.0), [3, 4])
    assert torch.equal(one.sample.ids, two.sample.ids)
    logits = policy.score(inputs, one.sample.ids).logits.detach()
    assert torch.equal(one.sample.ids - policy.codec.first_id, logits.argmax(-1))
    check_logprobs(one.engine_logprobs, policy, inputs, one.sample.ids, 1.0)


def test_probabilities_that_are_not_finite_are_refused(observation):
    policy = init_tiny("parallel", seed=1)
    with torch.no_grad():
        policy.model.language_model.lm_head.weight.fill_(float("nan"))
    engine = TorchEngine(policy, CPU)
    with pytest.raises(VlarlError, match=r"not finite with the weights that it was loaded with: set policy.dtype to"):
        engine.generate(policy.process([observation(0)]), Sampling(1.0), [0])
    engine.version = 3
    with pytest.raises(VlarlError, match=r"not finite \(weights of version 3\).*Lower optim.lr"):
        engine.generate(policy.process([observation(0)]), Sampling(1.0), [0])


def test_options_of_sampling_that_a_policy_does_not_take_are_refused(observation):
    policy = init_tiny("parallel", seed=1)
    inputs, engine = policy.process([observation(0)]), TorchEngine(policy, CPU)
    with pytest.raises(UsageError, match="this policy is not sampled with top_k, top_p: leave it at its default"):
        engine.generate(inputs, Sampling(0.5, top_p=0.9, top_k=3), [0])
    engine.generate(inputs, Sampling(0.5, top_p=1.0, top_k=0), [0])


@pytest.fixture
def regressing(observation):
    """A policy whose regression head acts, and what it reads."""
    policy = init_tiny("parallel", seed=1)
    policy.attach_l1_head(seed=2)
    policy.acts_by_regression = True
    return policy, policy.process([observation(0), observation(1), observation(2)])


@pytest.mark.parametrize("batch_size", [None, 2])
def test_the_actions_of_the_regression_head_have_log_prob_zero_whatever_the_seed(regressing, batch_size):
    policy, inputs = regressing
    engine = TorchEngine(policy, CPU, batch_size=batch_size)
    engine.version = 3
    decisions, again = (engine.generate(inputs, Sampling(0.0), seeds) for seeds in ([1, 2, 3], [4, 5, 6]))
    assert torch.equal(decisions.sample.actions, again.sample.actions)
    assert decisions.version.tolist() == [3, 3, 3] and (decisions.engine_logprobs == 0).all()
    assert decisions.engine_logprobs.shape == (3, policy.num_steps * policy.action_dim)
    torch.testing.assert_close(decisions.sample.actions, policy.regress(inputs).detach())
    expected = policy.unnormalize(decisions.sample.actions.numpy())
    assert all((ours == theirs).all() for ours, theirs in zip(policy.act(decisions), expected, strict=True))


def test_the_regression_head_does_not_sample(regressing):
    policy, inputs = regressing
    with pytest.raises(UsageError, match="temperature 1.0 with the regression head, which does not sample: use 0"):
        TorchEngine(policy, CPU).generate(inputs, Sampling(1.0), [1, 2, 3])


def test_regressed_actions_that_are_not_finite_are_refused(regressing):
    policy, inputs = regressing
    with torch.no_grad():
        next(iter(policy.l1_head.parameters())).fill_(float("nan"))
    with pytest.raises(VlarlError, match="not finite with the weights that it was loaded with"):
        TorchEngine(policy, CPU).generate(inputs, Sampling(0.0), [1, 2, 3])
