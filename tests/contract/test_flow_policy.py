"""What every Policy promises engines and learners, checked on SmolVLA with each kind of noise."""

import copy

import numpy as np
import pytest
import torch
from fakes.decisions import no_inputs
from fakes.smolvla import seen, smolvla

from vlarl.config.schema import Config, LoraConfig, PolicyConfig
from vlarl.decisions import Decisions, Sampling
from vlarl.errors import UsageError
from vlarl.policies.openvla.decisions import regressed_decisions
from vlarl.policies.smolvla.policy import SmolVLAPolicy
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.prepare import refuse_unsupported
from vlarl.weights.stream import weights_to_send

KINDS = ("sde", "cps", "noise")
CPU = torch.device("cpu")


@pytest.fixture(params=KINDS)
def policy(request: pytest.FixtureRequest) -> SmolVLAPolicy:
    found = smolvla(noise=request.param)
    if found.noise_head is not None:
        torch.nn.init.normal_(found.noise_head.out.weight, generator=torch.Generator().manual_seed(0))
    return found


def sampled(policy: SmolVLAPolicy, inputs, temperature: float = 1.0) -> Decisions:
    sampling = Sampling(temperature)
    return policy.sample(inputs, policy.noise(range(len(inputs)), sampling), sampling)


def test_decisions_have_the_shapes_that_the_contract_names(policy):
    inputs, sampling = policy.process([seen(0), seen(1)]), Sampling(1.0)
    count = policy.num_steps * policy.action_dim
    assert (policy.num_steps, policy.action_dim) == (3, 7), "neither the predicted 8 nor the padded 12"
    noise = policy.noise([5, 6], sampling)
    assert torch.equal(policy.noise([6], sampling)[0], noise[1]), "each row from its own seed"
    decisions = policy.sample(inputs, noise, sampling)
    assert decisions.mask.shape == (2, count) and decisions.mask.all() and decisions.version.tolist() == [0, 0]
    assert decisions.step.tolist() == [[step for step in range(3) for _ in range(7)]] * 2
    assert decisions.engine_logprobs.dtype == torch.float32 and not decisions.engine_logprobs.requires_grad
    found = policy.evaluate(inputs, decisions, 1.0)
    assert found.logprobs.shape == found.entropy.shape == (2, count) and found.values is None
    assert [actions.shape for actions in policy.act(decisions)] == [(3, 7)] * 2


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_log_probs_are_those_of_the_learner_at_the_same_temperature(policy, temperature):
    inputs = policy.process([seen(i) for i in range(6)])
    decisions = TorchEngine(policy, CPU).generate(inputs, Sampling(temperature), range(6))
    found = policy.evaluate(inputs, decisions, temperature)
    torch.testing.assert_close(decisions.engine_logprobs, found.logprobs, atol=1e-5, rtol=0)
    # The same sample at another temperature: log N(x; m, T s) follows from that at T = 1.
    other = policy.evaluate(inputs, decisions, 1.0)
    entropy_gap = (found.entropy - other.entropy).detach()
    torch.testing.assert_close(entropy_gap, torch.full_like(entropy_gap, float(np.log(temperature))), atol=1e-5, rtol=0)


def test_a_row_is_the_same_alone_and_in_any_batch(policy):
    observed = [seen(i) for i in range(4)]
    engine = TorchEngine(policy, CPU)
    together = engine.generate(policy.process(observed), Sampling(1.0), [11, 12, 13, 14])
    for row, one in enumerate(observed):
        alone = engine.generate(policy.process([one]), Sampling(1.0), [11 + row])
        assert alone.sample.index[0] == together.sample.index[row]
        torch.testing.assert_close(alone.sample.actions[0], together.sample.actions[row], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone.engine_logprobs[0], together.engine_logprobs[row], atol=1e-4, rtol=0)
    other = engine.generate(policy.process(observed), Sampling(1.0), [11, 99, 13, 14])
    assert not torch.isclose(other.sample.actions[1], together.sample.actions[1]).any()


def test_temperature_zero_is_the_ode(policy):
    """What the stochastic step would add does not matter, nor which step it is."""
    inputs = policy.process([seen(0), seen(1)])
    noise = policy.noise([1, 2], Sampling(0.0))
    half = (noise.shape[1] - 1) // 2
    other = torch.cat([noise[:, :half], torch.randn(2, half + 1).abs().clamp(max=0.999)], dim=1)
    one, two = (policy.sample(inputs, given, Sampling(0.0)) for given in (noise, other))
    assert torch.equal(one.sample.actions, two.sample.actions)
    assert one.engine_logprobs.isfinite().all()


def test_masked_elements_send_no_gradient_not_even_where_they_overflow(policy, monkeypatch):
    inputs = policy.process([seen(0)])
    decisions = sampled(policy, inputs)
    masked = decisions.executed(torch.tensor([policy.num_steps - 1]))
    with torch.no_grad():
        leaf, std = policy._field(policy.prefix(inputs), decisions.sample.before, torch.tensor([0.5]))

    def gradient(velocity):
        velocity = velocity.clone().requires_grad_()
        with monkeypatch.context() as patch:
            patch.setattr(policy, "_field", lambda *_: (velocity, std))
            found = policy.evaluate(inputs, masked, 1.6, entropy_gradient=True)
        sum(torch.where(masked.mask, column, 0.0).sum() for column in (found.logprobs, found.entropy)).backward()
        return velocity.grad

    broken = leaf.clone()
    broken[:, policy.num_steps - 1] = float("inf")
    clean, dirty = gradient(leaf), gradient(broken)
    assert torch.equal(clean, dirty) and clean[:, : policy.num_steps - 1, : policy.action_dim].abs().min() > 0
    assert not clean[:, policy.num_steps - 1 :].any() and not clean[:, :, policy.action_dim :].any()


def test_the_entropy_has_a_gradient_only_where_it_is_learned_and_requested(policy):
    inputs = policy.process([seen(0)])
    decisions = sampled(policy, inputs)
    without, requested = (policy.evaluate(inputs, decisions, 1.0, entropy_gradient=on) for on in (False, True))
    assert without.logprobs.requires_grad and not without.entropy.requires_grad
    assert requested.entropy.requires_grad == (policy.noise_head is not None)
    assert torch.equal(without.entropy, requested.entropy)


def test_inputs_and_decisions_of_another_policy_are_refused(policy):
    inputs = policy.process([seen(0)])
    with pytest.raises(AssertionError, match="decisions of another policy"):
        policy.evaluate(inputs, regressed_decisions(torch.zeros(1, 3, 7)), 1.0)
    with pytest.raises(AssertionError, match="inputs of another policy"):
        policy.sample(no_inputs(), policy.noise([0], Sampling()), Sampling())


@pytest.mark.parametrize("critic", ["vlm", "expert"])
@pytest.mark.parametrize("level", ["chunk", "step", "token"])
def test_the_critic_reads_the_state_before_the_decision(critic, level):
    policy = smolvla(critic=critic)
    head = policy.attach_value_head((8,), seed=1, level=level)
    torch.nn.init.normal_(head.out.weight, generator=torch.Generator().manual_seed(1))
    inputs = policy.process([seen(0), seen(1)])
    values = policy.values(inputs)
    assert values.shape == (2, {"chunk": 1, "step": 3, "token": 21}[level]) and values.dtype == torch.float32
    assert not torch.isclose(values[0], values[1]).any(), "states differ, and so do their values"
    for temperature in (1.0, 0.0):
        torch.testing.assert_close(policy.evaluate(inputs, sampled(policy, inputs, temperature), 1.0).values, values)
    assert policy.attach_value_head((8,), seed=2, level=level) is head


@pytest.mark.parametrize("critic", ["vlm", "expert"])
def test_gradients_of_the_critic_alone_stop_before_the_trunk(critic):
    policy = smolvla(critic=critic)
    policy.attach_value_head((8,), seed=1)
    inputs = policy.process([seen(0)])
    found = policy.evaluate(inputs, sampled(policy, inputs), 1.0, critic_only=True, entropy_gradient=True)
    assert not found.logprobs.requires_grad and not found.entropy.requires_grad
    found.values.sum().backward()
    reached = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert reached == {name for name, _ in policy.named_parameters() if name.startswith("value_head.")}


def test_saving_and_loading_changes_nothing(policy, tmp_path):
    head = policy.attach_value_head((8,), seed=1)
    torch.nn.init.normal_(head.out.weight)
    policy.save(tmp_path)
    loaded = smolvla(tmp_path, chunk_length=None, noise=policy.denoising.kind)
    assert (loaded.num_steps, loaded.action_dim, loaded.num_images) == (3, 7, 2)
    for (name, ours), (other, theirs) in zip(policy.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and torch.equal(ours, theirs)
    inputs = policy.process([seen(0)])
    assert torch.equal(sampled(loaded, inputs).sample.actions, sampled(policy, inputs).sample.actions)
    assert torch.equal(loaded.values(inputs), policy.values(inputs))


def test_a_copy_is_independent(policy):
    other = copy.deepcopy(policy)
    inputs = policy.process([seen(0)])
    before = sampled(policy, inputs).sample.actions
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(sampled(policy, inputs).sample.actions, before)


# What is trained


def trained(policy: SmolVLAPolicy) -> set[str]:
    parts = {"vlm.model.vision_model": "vision", "vlm.model.connector": "connector", "vlm.model.text": "text"}
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    return {next((part for key, part in parts.items() if key in name), "expert") for name in names}


def test_the_expert_alone_is_trained_by_default_and_the_rest_on_request():
    for options, expected in (
        ({}, {"expert"}),
        ({"train_backbone": True}, {"expert", "text", "vision", "connector"}),
        ({"train_backbone": True, "freeze": "vision"}, {"expert", "text"}),
        ({"freeze": "backbone"}, set()),
    ):
        policy = smolvla()
        policy.prepare_training(PolicyConfig(**options), LoraConfig(), seed=0)
        assert trained(policy) == expected, options


def test_gradients_reach_what_is_trained_and_nothing_else():
    """The state's projection too, through the frozen language model."""
    policy = smolvla(noise="noise")
    policy.prepare_training(PolicyConfig(), LoraConfig(), seed=0)
    inputs = policy.process([seen(0), seen(1)])
    policy.evaluate(inputs, sampled(policy, inputs), 1.0).logprobs.sum().backward()
    reached = {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert reached == {name for name, p in policy.named_parameters() if p.requires_grad}
    assert "model.state_proj.weight" in reached


def test_recomputed_layers_have_the_same_gradients():
    found = []
    for checkpointing in (False, True):
        policy = smolvla()
        policy.prepare_training(PolicyConfig(gradient_checkpointing=checkpointing), LoraConfig(), seed=0)
        inputs = policy.process([seen(0), seen(1)])
        policy.evaluate(inputs, sampled(policy, inputs), 1.0).logprobs.sum().backward()
        found.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_adapters_are_added_to_what_would_be_trained(tmp_path):
    policy = smolvla()
    policy.prepare_training(PolicyConfig(), LoraConfig(enabled=True, rank=2), seed=0)
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert names and all("lora_" in name and ".vlm.model." not in name for name in names)
    inputs = policy.process([seen(0)])
    plain = smolvla()
    assert torch.equal(sampled(policy, inputs).sample.actions, sampled(plain, inputs).sample.actions)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    policy.weights_changed()
    policy.save(tmp_path)
    loaded = smolvla(tmp_path, chunk_length=None)
    torch.testing.assert_close(
        sampled(loaded, inputs).sample.actions, sampled(policy, inputs).sample.actions, atol=1e-5, rtol=0
    )
    assert not torch.allclose(sampled(policy, inputs).sample.actions, sampled(plain, inputs).sample.actions)
    with policy.without_adapters():
        torch.testing.assert_close(sampled(policy, inputs).sample.actions, sampled(plain, inputs).sample.actions)


def test_the_expert_stays_float32_beside_a_bfloat16_backbone(tmp_path):
    policy = smolvla(dtype="bfloat16")
    kinds = {(".vlm.model." in name, p.dtype) for name, p in policy.named_parameters()}
    assert kinds == {(True, torch.bfloat16), (False, torch.float32)}
    policy.prepare_training(PolicyConfig(dtype="bfloat16"), LoraConfig(), seed=0)
    inputs = policy.process([seen(0)])
    decisions = sampled(policy, inputs)
    torch.testing.assert_close(policy.evaluate(inputs, decisions, 1.0).logprobs, decisions.engine_logprobs)
    with torch.no_grad():
        policy.model.action_out_proj.weight.add_(1e-6)  # an update that bfloat16 has no digits for
    policy.save(tmp_path, torch.bfloat16)
    again = smolvla(tmp_path)
    assert torch.equal(again.model.action_out_proj.weight, policy.model.action_out_proj.weight)
    with pytest.raises(UsageError, match="policy.train_backbone with policy.dtype = 'bfloat16'"):
        policy.prepare_training(PolicyConfig(dtype="bfloat16", train_backbone=True), LoraConfig(), seed=0)


def test_a_sync_to_engines_of_bfloat16_leaves_the_expert_in_float32():
    """Rounded to bfloat16, it would lose updates of the size that RL makes."""
    policy = smolvla(noise="noise")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 1e-6
    policy.model.backbone.requires_grad_(True)
    weights = policy.engine_weights()
    sent = dict(weights_to_send(policy, torch.bfloat16))
    expert = {name for name in sent if "lm_expert" in name or name.startswith(("noise_head", "model.action"))}
    assert len(expert) > 20 and all(torch.equal(sent[name], weights[name]) for name in expert)
    assert {sent[name].dtype for name in sent.keys() - expert} >= {torch.bfloat16}


def test_a_type_to_compute_in_is_refused():
    config = Config.model_validate({"distributed": {"compute_dtype": "bfloat16"}})
    with pytest.raises(UsageError, match=r"distributed\.compute_dtype = 'bfloat16': this policy computes in the types"):
        refuse_unsupported(smolvla(), config)
