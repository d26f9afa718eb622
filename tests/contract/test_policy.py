"""What every Policy promises engines and learners, checked on both decoders."""

import copy

import numpy as np
import pytest
import torch
from fakes.decisions import no_inputs
from fakes.float_error import logit_judge, value_judge

from vlarl.decisions import Decisions, Sampling
from vlarl.policies.distribution import greedy
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.decisions import regressed_decisions
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy, TokenScores


def choose(logits: torch.Tensor, first: int) -> torch.Tensor:
    return greedy(logits)


def sampled(policy: OpenVLAPolicy, inputs: OpenVLAInputs) -> Decisions:
    return policy.sample(inputs, policy.noise(range(len(inputs)), Sampling(1.0)), Sampling(1.0))


def test_shapes_and_supports_agree(policy, observation):
    inputs = policy.process([observation(0), observation(1, "put the bowl on the plate and the cup on the tray")])
    num_tokens = policy.num_steps * policy.action_dim
    ids, logits = policy.decode(inputs, choose)
    scores = policy.score(inputs, ids)
    assert ids.shape == (2, num_tokens) and ids.dtype == torch.int64
    assert logits.shape == scores.logits.shape == (2, num_tokens, policy.codec.num_bins)
    assert scores.logits.dtype == torch.float32 and scores.values is None
    assert policy.codec.first_id <= ids.min() and ids.max() < policy.codec.first_id + policy.codec.num_bins
    actions = policy.codec.decode(ids.numpy())
    assert actions.shape == (2, policy.num_steps, policy.action_dim) and np.abs(actions).max() <= 1
    np.testing.assert_array_equal(policy.codec.decode(policy.codec.encode(actions)), actions)
    assert policy.unnormalize(actions).shape == actions.shape


def test_decisions_have_the_shapes_that_the_contract_names(policy, observation):
    inputs = policy.process([observation(0), observation(1, "put the bowl on the plate and the cup on the tray")])
    sampling, num_tokens = Sampling(1.0), policy.num_steps * policy.action_dim
    assert len(inputs) == 2 and sampling.chosen() <= policy.sampling_options
    noise = policy.noise([5, 6], sampling)
    assert len(noise) == 2 and torch.equal(policy.noise([6], sampling)[0], noise[1]), "each row from its own seed"
    decisions = policy.sample(inputs, noise, sampling)
    assert len(decisions) == 2 and decisions.mask.shape == (2, num_tokens) and decisions.mask.all()
    assert decisions.mask.dtype == torch.bool and decisions.step.dtype == decisions.version.dtype == torch.int64
    assert decisions.engine_logprobs.dtype == torch.float32 and not decisions.engine_logprobs.requires_grad
    one_row = [step for step in range(policy.num_steps) for _ in range(policy.action_dim)]
    assert decisions.step.tolist() == [one_row, one_row] and decisions.version.tolist() == [0, 0]
    found = policy.evaluate(inputs, decisions, 1.0)
    assert found.logprobs.shape == found.entropy.shape == (2, num_tokens) and found.values is None
    assert found.logprobs.dtype == found.entropy.dtype == torch.float32 and found.extras == {}
    torch.testing.assert_close(found.logprobs, decisions.engine_logprobs, atol=1e-5, rtol=0)
    acted = policy.act(decisions)
    assert [actions.shape for actions in acted] == [(policy.num_steps, policy.action_dim)] * 2
    np.testing.assert_array_equal(
        np.stack(acted), policy.unnormalize(policy.codec.decode(decisions.sample.ids.numpy()))
    )


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_log_probs_and_entropies_are_those_of_the_logits_at_the_temperature(policy, observation, temperature):
    inputs = policy.process([observation(0), observation(1, "open the drawer and close it")])
    decisions = sampled(policy, inputs)
    found = policy.evaluate(inputs, decisions, temperature)
    ids = decisions.sample.ids
    expected = (policy.score(inputs, ids).logits / temperature).log_softmax(-1)
    indices = (ids - policy.codec.first_id).unsqueeze(-1)
    torch.testing.assert_close(found.logprobs, expected.gather(-1, indices).squeeze(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy, -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0)


def test_masked_elements_send_no_gradient_not_even_where_they_overflow(policy, observation, monkeypatch):
    """Logits of the last step are infinite: with that step masked, the gradients are those of the other steps."""
    inputs = policy.process([observation(0)])
    decisions = sampled(policy, inputs)
    leaf = policy.score(inputs, decisions.sample.ids).logits.detach()
    masked = decisions.executed(torch.tensor([policy.num_steps - 1]))

    def gradient(logits):
        logits = logits.clone().requires_grad_()
        with monkeypatch.context() as patch:
            patch.setattr(policy, "score", lambda *_, **__: TokenScores(logits, None))
            found = policy.evaluate(inputs, masked, 1.6, entropy_gradient=True, extras=policy.extras)
        columns = found.logprobs, found.entropy, *found.extras.values()
        sum(torch.where(masked.mask, column, 0.0).sum() for column in columns).backward()
        return logits.grad

    broken = leaf.masked_fill(~masked.mask.unsqueeze(-1), float("inf"))
    clean, dirty = gradient(leaf), gradient(broken)
    assert torch.equal(clean, dirty) and (clean[~masked.mask] == 0).all()
    if policy.num_steps > 1:
        assert clean.abs().max() > 0


def test_the_entropy_has_a_gradient_where_it_is_requested(policy, observation):
    inputs = policy.process([observation(0)])
    decisions = sampled(policy, inputs)
    without, requested = (policy.evaluate(inputs, decisions, 1.0, entropy_gradient=on) for on in (False, True))
    assert without.logprobs.requires_grad and not without.entropy.requires_grad and requested.entropy.requires_grad
    assert torch.equal(without.entropy, requested.entropy)
    with torch.no_grad():
        assert not policy.evaluate(inputs, decisions, 1.0, entropy_gradient=True).entropy.requires_grad


def test_extras_are_returned_on_request(policy, observation):
    inputs = policy.process([observation(0)])
    decisions = sampled(policy, inputs)
    found = policy.evaluate(inputs, decisions, 1.0, extras=("action_reconstruction",)).extras
    assert found.keys() == policy.extras == {"action_reconstruction"}
    logits = policy.score(inputs, decisions.sample.ids).logits
    taken = policy.bin_values()[decisions.sample.ids - policy.codec.first_id]
    torch.testing.assert_close(
        found["action_reconstruction"], (logits.softmax(-1) @ policy.bin_values() - taken) ** 2, atol=1e-5, rtol=0
    )


def test_decisions_of_another_policy_are_refused(policy, observation):
    inputs = policy.process([observation(0)])
    regressed = regressed_decisions(torch.zeros(1, policy.num_steps, policy.action_dim))
    with pytest.raises(AssertionError, match="decisions of another policy"):
        policy.evaluate(inputs, regressed, 1.0)
    with pytest.raises(AssertionError, match="inputs of another policy"):
        policy.sample(no_inputs(), policy.noise([0], Sampling()), Sampling())


def test_values_and_scores_read_the_same_state(policy, observation):
    policy.attach_value_head((8,), seed=1)
    torch.nn.init.normal_(policy.value_head.out.weight)
    inputs = policy.process([observation(0), observation(1, "open the drawer and close it")])
    ids, _ = policy.decode(inputs, choose)
    value_judge(policy, inputs).check(policy.score(inputs, ids).values)
    value_judge(policy, inputs).check(policy.evaluate(inputs, sampled(policy, inputs), 1.0).values)
    assert {n for n, _ in policy.named_parameters() if n.startswith("value_head.")}


@pytest.mark.parametrize("level", ["chunk", "step", "token"])
def test_a_critic_has_as_many_values_as_its_level_says(policy, observation, level):
    num_values = {"chunk": 1, "step": policy.num_steps, "token": policy.num_steps * policy.action_dim}[level]
    assert policy.attach_value_head((8,), seed=1, level=level).num_values == num_values
    inputs = policy.process([observation(0), observation(1)])
    decisions = sampled(policy, inputs)
    assert policy.values(inputs).shape == policy.values(inputs, decisions).shape == (2, num_values)
    assert policy.evaluate(inputs, decisions, 1.0).values.shape == (2, num_values)


def test_a_decision_may_have_several_values(policy, observation, tmp_path):
    num_values = policy.num_steps * policy.action_dim
    head = policy.attach_value_head((8,), seed=1, level="token")
    torch.nn.init.normal_(head.out.weight)
    inputs = policy.process([observation(0), observation(1, "open the drawer and close it")])
    ids, _ = policy.decode(inputs, choose)
    values = policy.score(inputs, ids).values
    assert values.shape == (2, num_values) and values.dtype == torch.float32
    assert values[0].unique().numel() == num_values
    value_judge(policy, inputs).check(values)
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.attach_value_head((8,), seed=2, level="token") is loaded.value_head
    assert torch.equal(loaded.values(inputs), policy.values(inputs))
    assert loaded.attach_value_head((8,), seed=2, level="chunk").out.out_features == 1
    loaded.detach_value_head()
    assert loaded.score(inputs, ids).values is None


def test_gradients_of_the_critic_alone_stop_before_the_trunk(policy, observation):
    policy.attach_value_head((8,), seed=1)
    torch.nn.init.normal_(policy.value_head.out.weight)
    inputs = policy.process([observation(0)])
    ids, _ = policy.decode(inputs, choose)
    scores = policy.score(inputs, ids, critic_only=True)
    assert not scores.logits.requires_grad
    logit_judge(policy, inputs, ids).check(scores.logits)
    found = policy.evaluate(inputs, sampled(policy, inputs), 1.0, critic_only=True, entropy_gradient=True)
    assert not found.logprobs.requires_grad and not found.entropy.requires_grad
    found.values.sum().backward()
    reached = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert reached == {name for name, _ in policy.named_parameters() if name.startswith("value_head.")}


def test_a_critic_that_is_there_is_kept(policy, observation, tmp_path):
    head = policy.attach_value_head((8,), seed=1)
    torch.nn.init.normal_(head.out.weight)
    assert policy.attach_value_head((8,), seed=2) is head
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    loaded.attach_value_head((4, 4), seed=3)
    inputs = policy.process([observation(0)])
    assert torch.equal(loaded.values(inputs), policy.values(inputs))


def test_every_trainable_weight_but_the_critic_has_a_gradient_or_is_unused(policy, observation):
    inputs = policy.process([observation(0)])
    ids, _ = policy.decode(inputs, choose)
    policy.score(inputs, ids).logits.square().sum().backward()
    moved = sum(p.numel() for p in policy.parameters() if p.grad is not None and p.grad.abs().sum() > 0)
    assert moved > 0.85 * sum(p.numel() for p in policy.parameters())


def test_saving_and_loading_changes_nothing(policy, observation, tmp_path):
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert (loaded.num_steps, loaded.action_dim, loaded.image_size) == (
        policy.num_steps,
        policy.action_dim,
        policy.image_size,
    )
    for (name, ours), (other, theirs) in zip(policy.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and torch.equal(ours, theirs)
    inputs = policy.process([observation(0)])
    assert torch.equal(policy.decode(inputs, choose)[1], loaded.decode(inputs, choose)[1])


def test_a_copy_is_independent(policy, observation):
    other = copy.deepcopy(policy)
    inputs = policy.process([observation(0)])
    before = policy.decode(inputs, choose)[1]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(policy.decode(inputs, choose)[1], before)
