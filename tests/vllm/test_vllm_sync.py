"""Weights into a running engine: the learner's log-probs after every sync, and no partial sync."""

from dataclasses import replace

import pytest
import torch
from engine_process import BUILTIN, FLOAT32, assert_agrees
from fakes.float_error import LOGPROB_FACTOR, check_logprobs, logprob_judge

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.decisions import Sampling
from vlarl.errors import UsageError, VlarlError
from vlarl.policies.load import load_policy
from vlarl.weights.stream import ChangedWeights, bucket_message, buckets


def test_every_sync_brings_the_learners_weights(engine, policy, observations, disturb):
    """The same prompts and images before and after: what the caches hold of the old weights must not be read."""
    inputs = policy.process(observations(8))
    before = engine.generate(inputs, Sampling(1.6), range(8))
    for version in (1, 2, 3):
        disturb(policy, version)
        engine.load_weights(policy.named_parameters(), version)
        tokens = assert_agrees(engine, policy, inputs, 1.6, range(8))
        assert tokens.version.tolist() == [version] * 8 and engine.version == version
        assert (tokens.engine_logprobs - before.engine_logprobs).abs().max() > 1e-2
        before = tokens
    with torch.no_grad():  # one matrix that is wrong by a thousandth would be seen
        policy.model.language_model.model.layers[0].self_attn.v_proj.weight.mul_(1.001)
    judge = logprob_judge(policy, inputs, before.sample.ids, 1.6)
    assert judge.problem(before.engine_logprobs, LOGPROB_FACTOR)


def test_what_was_computed_of_a_long_prompt_is_not_read_after_a_sync(engine, policy, observations, disturb):
    """vLLM keeps the keys and values of whole blocks, of 128 tokens on a CPU: prompts must be longer to fill one."""
    text = "put the bowl on the plate and open the drawer " * 14
    inputs = policy.process([replace(seen, instruction=text) for seen in observations(2)])
    assert inputs.attention_mask.sum(1).min() > 128
    before = assert_agrees(engine, policy, inputs, 1.6, range(2))
    disturb(policy, 5)
    engine.load_weights(policy.named_parameters(), 5)
    after = assert_agrees(engine, policy, inputs, 1.6, range(2))  # 0.1 and more with keys of the old weights
    assert (after.engine_logprobs - before.engine_logprobs).abs().max() > 1e-2


def test_part_of_the_layers_may_be_sent(engine, policy, observations, disturb):
    disturb(policy, 7)
    whole = dict(policy.named_parameters())
    old = dict(load_policy(BUILTIN).named_parameters())
    sent = {n: p for n, p in whole.items() if "layers.1." in n or "fused_featurizer" in n}
    with torch.no_grad():
        for name in whole.keys() - sent.keys():
            whole[name].copy_(old[name])
    engine.load_weights(sent.items(), 4)
    assert_agrees(engine, policy, policy.process(observations(4)), 1.6, range(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.language_model.model.layers.0.self_attn.k_proj.weight"), r"k_proj.weight is missing"),
        (lambda w: w.pop("model.projector.fc1.bias"), r"projector.fc1.bias is missing"),
        (lambda w: w.update({"model.projector.fc9.weight": torch.ones(2)}), r"projector.fc9.weight is not a weight"),
        (
            lambda w: w.update({"model.projector.fc1.bias": torch.ones(2)}),
            r"projector.fc1.bias has shape \(2,\), the engine's \(1024,\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(engine, policy, observations, disturb, change, message):
    inputs = policy.process(observations(2))
    before = engine.generate(inputs, Sampling(1.0), [1, 2])
    disturb(policy, 1)
    weights = {n: p.detach() for n, p in policy.named_parameters()}
    change(weights)
    with pytest.raises(UsageError, match=message):
        engine.load_weights(weights.items(), 5)
    after = engine.generate(inputs, Sampling(1.0), [1, 2])
    assert after.version.tolist() == [0, 0] and torch.equal(after.sample.ids, before.sample.ids)
    check_logprobs(after.engine_logprobs, load_policy(BUILTIN), inputs, after.sample.ids, 1.0)


def test_a_version_has_to_be_complete_and_the_one_that_was_started(engine, policy, observations):
    inputs = policy.process(observations(1))
    changed = ChangedWeights(policy, engine_has_base=False).next()
    engine.start_sync(dict(changed.shapes), 8)
    with pytest.raises(VlarlError, match="the sync to version 8 has not ended"):
        engine.generate(inputs, Sampling(1.0), [1])
    with pytest.raises(VlarlError, match="version 9 can't be loaded: the sync to version 8"):
        engine.start_sync(dict(changed.shapes), 9)
    with pytest.raises(VlarlError, match=r"version 8 is incomplete: \d+ weights have not arrived"):
        engine.finish_sync(8)
    for payload in buckets(changed, 1 << 20):
        engine.update_weights(bucket_message(payload, True))
    with pytest.raises(VlarlError, match="version 7 was not started: the sync in progress is to version 8"):
        engine.finish_sync(7)
    engine.finish_sync(8)
    assert engine.generate(inputs, Sampling(1.0), [1]).version.tolist() == [8]
    engine.tamper_with_version("3")
    with pytest.raises(VlarlError, match="vLLM runs weights of version 3, not 8"):
        engine.generate(inputs, Sampling(1.0), [1])


def test_an_adapter_is_folded_during_a_sync(engines, observations, bytes_of, tmp_path):
    """The engine starts from the base. Only what adapters change is sent, with the rest of its layers."""
    learner = load_policy(BUILTIN)
    targets = ("q_proj", "down_proj", "fc1")
    learner.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=4, alpha=2, target_modules=targets), seed=1)
    learner.save(tmp_path / "adapter")
    engine = engines.start("adapter", str(tmp_path / "adapter"), FLOAT32)
    inputs = learner.process(observations(6))
    with pytest.raises(VlarlError, match="the engine has only its base until the first sync"):
        engine.generate(inputs, Sampling(1.0), range(6))
    generator = torch.Generator().manual_seed(0)
    changed = ChangedWeights(learner, engine_has_base=True)
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in learner.named_parameters():
                if ".lora_B." in name:
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        before = bytes_of(learner)
        stream = changed.next()
        assert "language_model.model.layers.0.self_attn.k_proj.weight" in stream.shapes  # packed with q_proj
        assert "language_model.lm_head.weight" not in stream.shapes
        engine.load_weights(stream, version)
        changed.sent()
        assert bytes_of(learner) == before
        assert_agrees(engine, learner, inputs, 1.6, range(6))


def test_a_damaged_bucket_is_refused_and_the_next_sync_repairs(engine, policy, observations):
    stream = ChangedWeights(policy, engine_has_base=False).next()
    first = next(buckets(stream, 1 << 20))
    damaged = bucket_message(first, True) | {"payload": first[:-1] + bytes([first[-1] ^ 1])}
    engine.start_sync(dict(stream.shapes), 6)
    engine.update_weights(bucket_message(first, True))
    with pytest.raises(VlarlError, match="arrived damaged"):
        engine.update_weights(damaged)
    inputs = policy.process(observations(1))
    with pytest.raises(VlarlError, match="the sync to version 6 failed halfway"):
        engine.generate(inputs, Sampling(1.0), [1])
    with pytest.raises(UsageError, match="vision_backbone.*is missing"):
        engine.load_weights([(n, p) for n, p in policy.named_parameters() if "projector" in n], 7)
    engine.load_weights(policy.named_parameters(), 7)
    assert_agrees(engine, policy, inputs, 1.0, [1])
    with pytest.raises(VlarlError, match="no sync is in progress"):
        engine.update_weights(bucket_message(first, True))
    assert_agrees(engine, policy, inputs, 1.0, [1])
