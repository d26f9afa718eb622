"""Weights into a running engine: the learner's log-probs after every sync, and no partial sync."""

from dataclasses import replace

import pytest
import torch
from engine_process import BUILTIN, FLOAT32, RemoteEngine, assert_agrees
from fakes.float_error import LOGPROB_FACTOR, check_logprobs, logprob_judge
from fakes.syncing import all_weights, messages, only, stream_of, sync

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.decisions import Sampling
from vlarl.errors import UsageError, VlarlError
from vlarl.policies.load import load_policy
from vlarl.weights.stream import is_adapter_weight, weights_to_send


def test_every_sync_brings_the_learners_weights(engine, policy, observations, disturb):
    """The same prompts and images before and after: what the caches hold of the old weights must not be read."""
    inputs = policy.process(observations(8))
    before = engine.generate(inputs, Sampling(1.6), range(8))
    for version in (1, 2, 3):
        disturb(policy, version)
        sync(engine, all_weights(policy), version, staged=version == 2)
        tokens = assert_agrees(engine, policy, inputs, 1.6, range(8))
        assert tokens.version.tolist() == [version] * 8 and engine.version == version
        assert (tokens.engine_logprobs - before.engine_logprobs).abs().max() > 1e-2
        before = tokens
    with torch.no_grad():  # one matrix that is wrong by a thousandth would be seen
        policy.model.language_model.model.layers[0].self_attn.v_proj.weight.mul_(1.001)
    judge = logprob_judge(policy, inputs, before.sample.ids, 1.6)
    assert judge.problem(before.engine_logprobs, LOGPROB_FACTOR)


def test_the_engine_acts_with_its_old_weights_until_a_staged_sync_is_finished(engine, policy, observations, disturb):
    inputs = policy.process(observations(2))
    before = engine.generate(inputs, Sampling(1.6), range(2))
    disturb(policy, 1)
    changed = all_weights(policy)
    engine.start_sync(dict(changed.shapes), 6, True)
    for message in messages(changed):
        during = engine.generate(inputs, Sampling(1.6), range(2))
        engine.update_weights(message)
    assert during.version.tolist() == [0, 0] and torch.equal(during.sample.ids, before.sample.ids)
    check_logprobs(during.engine_logprobs, load_policy(BUILTIN), inputs, during.sample.ids, 1.6)
    engine.finish_sync(6)
    assert assert_agrees(engine, policy, inputs, 1.6, range(2)).version.tolist() == [6, 6]


def test_a_sync_of_all_that_is_trained_brings_back_a_model_that_was_forgotten(engine, policy, observations):
    """What an engine on a GPU relies on after a sleep that discards its weights."""
    inputs = policy.process(observations(4))
    assert engine.forget()[0] > 50
    with pytest.raises(AssertionError):
        assert_agrees(engine, policy, inputs, 1.6, range(4))
    sync(engine, weights_to_send(policy), 1)
    assert_agrees(engine, policy, inputs, 1.6, range(4))


def test_what_was_computed_of_a_long_prompt_is_not_read_after_a_sync(engine, policy, observations, disturb):
    """vLLM keeps the keys and values of whole blocks, of 128 tokens on a CPU: prompts must be longer to fill one."""
    text = "put the bowl on the plate and open the drawer " * 14
    inputs = policy.process([replace(seen, instruction=text) for seen in observations(2)])
    assert inputs.attention_mask.sum(1).min() > 128
    before = assert_agrees(engine, policy, inputs, 1.6, range(2))
    disturb(policy, 5)
    sync(engine, all_weights(policy), 5)
    after = assert_agrees(engine, policy, inputs, 1.6, range(2))  # 0.1 and more with keys of the old weights
    assert (after.engine_logprobs - before.engine_logprobs).abs().max() > 1e-2


def test_part_of_the_layers_may_be_sent(engine, policy, observations, disturb):
    disturb(policy, 7)
    whole, old = policy.engine_weights(), load_policy(BUILTIN).engine_weights()
    sent = {n: p for n, p in whole.items() if "layers.1." in n or "fused_featurizer" in n}
    with torch.no_grad():
        for name in whole.keys() - sent.keys():
            whole[name].copy_(old[name])
    sync(engine, stream_of(sent.items()), 4)
    assert_agrees(engine, policy, policy.process(observations(4)), 1.6, range(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("language_model.model.layers.0.self_attn.k_proj.weight"), r"k_proj.weight is missing"),
        (lambda w: w.pop("projector.fc1.bias"), r"projector.fc1.bias is missing"),
        (lambda w: w.update({"projector.fc9.weight": torch.ones(2)}), r"projector.fc9.weight is not a weight"),
        (
            lambda w: w.update({"projector.fc1.bias": torch.ones(2)}),
            r"projector.fc1.bias has shape \(2,\), the engine's \(1024,\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(engine, policy, observations, disturb, change, message):
    inputs = policy.process(observations(2))
    before = engine.generate(inputs, Sampling(1.0), [1, 2])
    disturb(policy, 1)
    weights = {n: p.detach() for n, p in policy.engine_weights().items()}
    change(weights)
    with pytest.raises(UsageError, match=message):
        sync(engine, stream_of(weights.items()), 5)
    after = engine.generate(inputs, Sampling(1.0), [1, 2])
    assert after.version.tolist() == [0, 0] and torch.equal(after.sample.ids, before.sample.ids)
    check_logprobs(after.engine_logprobs, load_policy(BUILTIN), inputs, after.sample.ids, 1.0)


def test_a_version_has_to_be_complete_and_the_one_that_was_started(engine, policy, observations):
    inputs = policy.process(observations(1))
    changed = all_weights(policy)
    engine.start_sync(dict(changed.shapes), 8)
    with pytest.raises(VlarlError, match="the sync to version 8 has not ended"):
        engine.generate(inputs, Sampling(1.0), [1])
    with pytest.raises(VlarlError, match="version 9 can't be loaded: the sync to version 8"):
        engine.start_sync(dict(changed.shapes), 9)
    with pytest.raises(VlarlError, match=r"version 8 is incomplete: \d+ weights have not arrived"):
        engine.finish_sync(8)
    for message in messages(changed):
        engine.update_weights(message)
    with pytest.raises(VlarlError, match="version 7 was not started: the sync in progress is to version 8"):
        engine.finish_sync(7)
    engine.finish_sync(8)
    assert engine.generate(inputs, Sampling(1.0), [1]).version.tolist() == [8]
    engine.tamper_with_version("3")
    with pytest.raises(VlarlError, match="vLLM runs weights of version 3, not 8"):
        engine.generate(inputs, Sampling(1.0), [1])


TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj", "qkv", "fc1")  # packed and not, in vLLM's layers and in ours


def test_adapters_are_sent_and_kept_as_adapters(engines, observations, bytes_of, tmp_path):
    """The engine starts from the base. Only adapters are sent, and the sum with the base is made in each pass."""
    learner = load_policy(BUILTIN)
    learner.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=4, alpha=2, target_modules=TARGETS), seed=1)
    learner.save(tmp_path / "adapter")
    engine = engines.start("adapter", str(tmp_path / "adapter"), FLOAT32)
    inputs = learner.process(observations(6))
    with pytest.raises(VlarlError, match="the engine has only its base until the first sync"):
        engine.generate(inputs, Sampling(1.0), range(6))
    generator, before = torch.Generator().manual_seed(0), None
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in learner.named_parameters():
                if ".lora_B." in name:
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        unchanged = bytes_of(learner)
        stream = weights_to_send(learner, torch.float32)
        assert all(map(is_adapter_weight, stream.shapes))
        assert {name.split(".")[-3] for name in stream.shapes} == set(TARGETS)
        sync(engine, stream, version, staged=version == 2)
        assert bytes_of(learner) == unchanged
        tokens = assert_agrees(engine, learner, inputs, 1.6, range(6))
        assert tokens.version.tolist() == [version] * 6
        assert before is None or (tokens.engine_logprobs - before).abs().max() > 1e-2
        before = tokens.engine_logprobs


def test_frozen_adapters_reach_the_engine(engines, observations, tmp_path):
    """With policy.freeze vision, adapters that were trained before stay as they are, and count."""
    trained = load_policy(BUILTIN)
    trained.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=4, target_modules=TARGETS), seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    trained.save(tmp_path / "adapter")
    learner = load_policy(tmp_path / "adapter")
    learner.prepare_training(ModelConfig(freeze="vision"), LoraConfig(), seed=1)
    engine = engines.start("frozen", str(tmp_path / "adapter"), FLOAT32)
    stream = weights_to_send(learner)
    moving = [name for name in stream.shapes if "vision" not in name]
    with pytest.raises(UsageError, match="vision_backbone.*is missing, and the engine can't act without it"):
        sync(engine, only(stream, moving), 1)
    sync(engine, stream, 1)
    assert_agrees(engine, learner, learner.process(observations(4)), 1.6, range(4))


@pytest.mark.parametrize("target", TARGETS)
def test_one_matrix_of_an_adapter_that_is_lost_would_be_noticed(engines, observations, target):
    """Each kind of layer has its own slot for A and B: what a sync brings to one of them changes the log-probs."""
    lora = {"enabled": True, "rank": 3, "target_modules": TARGETS}
    engine = engines.start("slots", BUILTIN, FLOAT32, lora) if target == TARGETS[0] else RemoteEngine(engines, "slots")
    learner = load_policy(BUILTIN)
    learner.prepare_training(ModelConfig(), LoraConfig(**lora), seed=1)
    inputs = learner.process(observations(4))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if ".lora_B." in name and f".{target}." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    sync(engine, weights_to_send(learner), 1)
    tokens = assert_agrees(engine, learner, inputs, 1.6, range(4))
    judge = logprob_judge(load_policy(BUILTIN), inputs, tokens.sample.ids, 1.6)
    assert judge.problem(tokens.engine_logprobs, LOGPROB_FACTOR), "without the adapter they are others"


def test_a_damaged_bucket_is_refused_and_the_sync_after_a_failed_one_repairs(engine, policy, observations):
    stream = all_weights(policy)
    first = messages(stream)[0]
    damaged = first | {"payload": first["payload"][:-1] + bytes([first["payload"][-1] ^ 1])}
    engine.start_sync(dict(stream.shapes), 6)
    engine.update_weights(first)
    with pytest.raises(VlarlError, match="arrived damaged"):
        engine.update_weights(damaged)
    with pytest.raises(VlarlError, match="was not announced"):  # the sync goes on until a message fails
        engine.update_weights(first)
    inputs = policy.process(observations(1))
    with pytest.raises(VlarlError, match="the sync to version 6 failed halfway"):
        engine.generate(inputs, Sampling(1.0), [1])
    with pytest.raises(UsageError, match="is missing, and the engine can't act without it"):
        sync(engine, only(stream, [name for name in stream.shapes if "projector" in name]), 7)
    sync(engine, all_weights(policy), 7)
    assert_agrees(engine, policy, inputs, 1.0, [1])
    with pytest.raises(VlarlError, match="no sync is in progress"):
        engine.update_weights(first)
    assert_agrees(engine, policy, inputs, 1.0, [1])
