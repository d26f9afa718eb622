"""The vLLM engine against the torch policy: the same log-probs, tokens from seeds alone, action ids only."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from engine_process import BUILTIN, FLOAT32, assert_agrees

from vlarl.config.schema import LoraConfig, ModelConfig, VllmConfig
from vlarl.decisions import Sampling
from vlarl.errors import UsageError
from vlarl.policies.checkpoint_json import read_json, write_json
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import init_tiny, initialize
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.rollout.engines.vllm import VllmEngine

GOLDEN = Path(__file__).parents[1] / "golden" / "openvla-tiny"
LLAMA_EMPTY_TOKEN = 29871


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.6])
def test_log_probs_are_those_of_the_learner(engine, policy, observations, temperature):
    tokens = assert_agrees(engine, policy, policy.process(observations(16)), temperature, range(16))
    assert tokens.engine_logprobs.dtype == torch.float32 and engine.version == 0
    assert tokens.version.tolist() == [0] * 16


def test_an_original_checkpoint_with_another_vocabulary(engines, tmp_path):
    """bfloat16 on disk, shards, no key of ours; 32064 ids, of which only 256 are actions: no other may be sampled."""
    raw = read_json(GOLDEN / "config.json")
    raw["text_config"] |= {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    fresh = OpenVLAPolicy(parse_config(raw), None)
    initialize(fresh, torch.Generator().manual_seed(0))
    fresh.save(tmp_path, torch.bfloat16, max_shard_bytes=1 << 20)
    write_json(tmp_path / "config.json", raw)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    policy = load_policy(tmp_path)
    engine = engines.start("original", str(tmp_path), FLOAT32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 29000, (4, 9), generator=generator)
    ids[:, 0], ids[:, -1] = 1, LLAMA_EMPTY_TOKEN
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 6:] = False
    pixels = torch.randint(0, 256, (4, 1, 3, 56, 56), dtype=torch.uint8, generator=generator)
    for temperature in (0.6, 1.0, 1.6):
        inputs = OpenVLAInputs(ids, mask, pixels, None)
        tokens = assert_agrees(engine, policy, inputs, temperature, [1, 2, 3, 4])
        assert int(tokens.sample.ids.min()) >= 31744 and int(tokens.sample.ids.max()) <= 31999


def test_heads_that_vllm_does_not_support_are_refused():
    with pytest.raises(UsageError, match="heads of size 8; vLLM on a CPU supports 32, 64.*vllm.num_engines 0"):
        VllmEngine(load_policy(GOLDEN, device="meta"), VllmConfig(), torch.float32)


def test_two_images_and_no_proprio(engines, observations, tmp_path):
    policy = init_tiny("autoregressive", seed=3, num_images=2, use_proprio=False)
    with torch.no_grad():
        policy.model.language_model.lm_head.weight.mul_(15)  # initial ones are near uniform, and would hide errors
    policy.save(tmp_path / "two")
    engine = engines.start("two images", str(tmp_path / "two"), FLOAT32)
    inputs = policy.process(observations(6))
    for temperature in (0.6, 1.6, 1.0):
        tokens = assert_agrees(engine, policy, inputs, temperature, range(6))
    swapped = OpenVLAInputs(inputs.input_ids, inputs.attention_mask, inputs.pixels.flip(1), None)
    with torch.no_grad():
        other = policy.evaluate(swapped, tokens, 1.0).logprobs
    assert (other - tokens.engine_logprobs).abs().max() > 1e-2  # the order of the images matters


def test_temperature_zero_is_greedy(engine, policy, observations):
    inputs = policy.process(observations(8))
    tokens = assert_agrees(engine, policy, inputs, 0.0, range(8))
    expected = TorchEngine(policy, torch.device("cpu")).generate(inputs, Sampling(0.0), range(8))
    assert torch.equal(tokens.sample.ids, expected.sample.ids)


def test_a_row_depends_on_its_own_seed_whatever_the_batch(engine, policy, observations):
    seen = observations(5)
    seeds = [11, 2**63 + 5, 13, 14, 15]
    together = engine.generate(policy.process(seen), Sampling(1.6), seeds)
    turned = engine.generate(policy.process(seen[::-1]), Sampling(1.6), seeds[::-1])
    assert torch.equal(turned.sample.ids.flip(0), together.sample.ids)
    alone = engine.generate(policy.process(seen[1:2]), Sampling(1.6), seeds[1:2])
    assert torch.equal(alone.sample.ids[0], together.sample.ids[1])
    other = engine.generate(policy.process(seen), Sampling(1.6), [11, 99, 13, 14, 15])
    assert torch.equal(other.sample.ids[[0, 2, 3, 4]], together.sample.ids[[0, 2, 3, 4]])
    assert not torch.equal(other.sample.ids[1], together.sample.ids[1])


def test_samples_follow_the_distribution(engine, policy, observations):
    """Many seeds for one observation: the first token's frequencies against its probabilities."""
    count, temperature = 400, 1.6
    one = policy.process(observations(1))
    tokens = engine.generate(one.rows(torch.zeros(count, dtype=torch.int64)), Sampling(temperature), range(count))
    with torch.no_grad():
        probs = (policy.score(one, tokens.sample.ids[:1]).logits[0, 0] / temperature).softmax(-1)
    seen = torch.bincount(tokens.sample.ids[:, 0] - policy.codec.first_id, minlength=256) / count
    likely = probs.topk(3).indices
    std = (probs[likely] * (1 - probs[likely]) / count).sqrt()
    assert ((seen[likely] - probs[likely]).abs() < 4 * std).all()


def test_a_prompt_that_is_too_long_is_refused(engine, policy, observations):
    one = policy.process(observations(1))
    long = OpenVLAInputs(
        one.input_ids[:, -1:].repeat(1, 600), torch.ones(1, 600, dtype=torch.bool), one.pixels, one.proprio
    )
    with pytest.raises(UsageError, match=r"takes 624 tokens; the engine supports 512"):
        engine.generate(long, Sampling(1.0), [0])


def test_parallel_decoding_is_refused():
    with pytest.raises(UsageError, match=r"builtin:tiny-oft decodes in parallel .*vllm.num_engines 0"):
        VllmEngine(load_policy("builtin:tiny-oft", device="meta"), VllmConfig(), torch.float32)


def test_vllms_own_class_is_for_the_original_model_alone():
    with pytest.raises(UsageError, match="not the original OpenVLA .*model_class 'vlarl'"):
        VllmEngine(load_policy(BUILTIN, device="meta"), VllmConfig(model_class="vllm"), torch.float32)


def test_engine_subprocesses_find_the_model_by_an_entry_point():
    plugins = {plugin.name: plugin.value for plugin in entry_points(group="vllm.general_plugins")}
    assert plugins["vlarl_openvla"] == "vlarl.policies.openvla.vllm.plugin:register"
    assert plugins["vlarl_weights"] == "vlarl.weights.vllm_plugin:register"


def test_an_adapter_that_vllm_would_ignore_is_refused():
    """vLLM's head computes logits without calling its forward."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from vlarl.weights.vllm_adapters import attach

    model = torch.nn.Module()
    head = ParallelLMHead.__new__(ParallelLMHead)
    torch.nn.Module.__init__(head)
    model.lm_head = head
    with pytest.raises(UsageError, match=r"an adapter on lm_head can't run in vLLM.*lora.target_modules"):
        attach(model, {"lm_head": (4, 1.0)})
    with pytest.raises(UsageError, match=r"an adapter on towers\.qkv can't run in vLLM"):
        attach(model, {"towers.qkv": (4, 1.0)})


def test_compiled_graphs_are_told_apart_by_their_adapters(monkeypatch):
    """vLLM keeps compiled graphs on disk, by a hash of its configuration, and runs them without looking at the model."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    hashes = []

    def hashed(**arguments):
        del arguments["weight_transfer_config"]
        hashes.append(EngineArgs(**arguments).create_engine_config().compute_hash())
        raise KeyboardInterrupt

    monkeypatch.setattr(vllm, "LLM", hashed)
    for lora in ({}, {"rank": 8}, {"rank": 32}, {"rank": 8, "target_modules": ("q_proj",)}, {"rank": 8}):
        policy = load_policy(BUILTIN, device="meta")
        policy.adapt(ModelConfig(), LoraConfig(enabled=bool(lora), **lora), seed=0)
        with pytest.raises(KeyboardInterrupt):
            VllmEngine(policy, VllmConfig(), torch.float32)
    assert len(set(hashes)) == 4 and hashes[1] == hashes[4]
