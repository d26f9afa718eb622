"""What every Engine promises the collector, checked on the torch engine with both decoders."""

import pytest
import torch
from fakes.float_error import check_logprobs

from vlarl.decisions import Sampling
from vlarl.rollout.engines.torch import TorchEngine

TEXTS = ("open the drawer", "put the zigzag bowl on the plate and close the drawer", "pick up the red cube")


@pytest.fixture
def engine(policy) -> TorchEngine:
    return TorchEngine(policy, torch.device("cpu"))


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_log_probs_are_those_of_the_learner_at_the_same_temperature(policy, engine, observation, temperature):
    inputs = policy.process([observation(i, text) for i, text in enumerate(TEXTS)])
    decisions = engine.generate(inputs, Sampling(temperature), [1, 2, 3])
    check_logprobs(decisions.engine_logprobs, policy, inputs, decisions.sample.ids, temperature)
    with torch.no_grad():
        learner = policy.evaluate(inputs, decisions, temperature)
    torch.testing.assert_close(decisions.engine_logprobs, learner.logprobs, atol=1e-5, rtol=0)
    assert decisions.engine_logprobs.dtype == torch.float32 and not decisions.engine_logprobs.requires_grad
    assert decisions.version.tolist() == [0, 0, 0] and engine.version == 0


def test_a_row_depends_on_its_own_seed_whatever_the_batch(policy, engine, observation):
    seen = [observation(i, text) for i, text in enumerate(TEXTS)]
    together = engine.generate(policy.process(seen), Sampling(1.0), [11, 12, 13])
    turned = engine.generate(policy.process(seen[::-1]), Sampling(1.0), [13, 12, 11])
    assert torch.equal(turned.sample.ids.flip(0), together.sample.ids)
    for i, observed in enumerate(seen):
        alone = engine.generate(policy.process([observed]), Sampling(1.0), [11 + i])
        assert torch.equal(alone.sample.ids[0], together.sample.ids[i])
    other = engine.generate(policy.process(seen), Sampling(1.0), [11, 99, 13])
    theirs, ours = other.sample.ids, together.sample.ids
    assert torch.equal(theirs[[0, 2]], ours[[0, 2]]) and not torch.equal(theirs[1], ours[1])


def test_samples_follow_the_distribution(policy, engine, observation):
    """Many seeds for one observation: the first token's frequencies against its probabilities."""
    with torch.no_grad():
        policy.model.language_model.lm_head.weight.mul_(15)  # a distribution with a few likely tokens
    count = 400
    one = policy.process([observation(0)])
    inputs = one.rows(torch.zeros(count, dtype=torch.int64))
    ids = engine.generate(inputs, Sampling(1.6), list(range(count))).sample.ids
    probs = (policy.score(one, ids[:1]).logits[0, 0].detach() / 1.6).softmax(-1)
    seen = torch.bincount(ids[:, 0] - policy.codec.first_id, minlength=256) / count
    likely = probs.topk(3).indices
    assert probs[likely].sum() > 0.15
    standard_error = (probs[likely] * (1 - probs[likely]) / count).sqrt()
    assert ((seen[likely] - probs[likely]).abs() < 4 * standard_error).all()


def test_temperature_zero_is_greedy(policy, engine, observation):
    inputs = policy.process([observation(0), observation(1)])
    ids = engine.generate(inputs, Sampling(0.0), [1, 2]).sample.ids
    logits = policy.score(inputs, ids).logits
    assert torch.equal(ids - policy.codec.first_id, logits.argmax(-1))


def test_it_reports_the_version_it_was_given(policy, engine, observation):
    engine.weights_changed(12)
    assert engine.version == 12
    assert engine.generate(policy.process([observation(0)]), Sampling(1.0), [0]).version.tolist() == [12]
