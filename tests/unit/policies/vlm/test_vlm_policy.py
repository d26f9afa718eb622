"""Training a text policy: ratios, critic, adapters, freezing, and folders that the library itself loads."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from fakes.decisions import split
from fakes.vlm_models import END, IDS, MODELS, PAD, TEXT_SIZES, WITH_IMAGES, observation
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from vlarl.config.schema import LoraConfig, PolicyConfig
from vlarl.decisions import Sampling
from vlarl.errors import UsageError
from vlarl.policies.checksums import checksums, write_checksums
from vlarl.policies.vlm.checkpoint import read_policy
from vlarl.policies.vlm.model import ModelAccess
from vlarl.training.critic import copy_sharing_frozen

SAMPLING = Sampling(1.0, max_tokens=6, stop=tuple(range(60)))
LORA = LoraConfig(enabled=True, rank=2)


def sampled(policy, count=4):
    images = (0, 1, 3) if policy.processor.reads_images else (0,)
    observations = [observation("what is it? " * (i % 4 + 1), images[i % len(images)], i) for i in range(count)]
    inputs = policy.process(observations)
    return inputs, policy.sample(inputs, policy.noise(range(count), SAMPLING), SAMPLING)


def logprobs(policy, inputs, decisions):
    with torch.no_grad():
        return policy.evaluate(inputs, decisions, 1.0).logprobs


def step(policy, inputs, decisions, lr=0.02):
    """One step of ascent on the log-probs of the given texts."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    policy.train()
    (-policy.evaluate(inputs, decisions, 1.0).logprobs.sum()).backward()
    policy.eval()
    with torch.no_grad():
        for p in trained:
            if p.grad is not None:
                p -= lr * p.grad / (p.grad.norm() + 1e-9)
    policy.zero_grad(set_to_none=True)
    policy.weights_changed()


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llama", "qwen3_moe"])
def test_the_first_ratio_is_exactly_one(folder_of, kind):
    """The pass before the first step, without gradients, and the pass of the step itself give the same bits."""
    policy = read_policy(folder_of(kind))
    policy.prepare_training(PolicyConfig(gradient_checkpointing=True), LoraConfig(), 0)
    inputs, decisions = sampled(policy)
    before = logprobs(policy, inputs, decisions)
    policy.train()
    during = policy.evaluate(inputs, decisions, 1.0).logprobs
    assert torch.equal((during - before).exp(), torch.ones_like(before))


def test_nothing_is_random_in_training(folder_of):
    """Dropout of attention, which is not a layer, dropout layers, and the noise of a router."""
    policy = read_policy(folder_of("mixtral"))
    noisy = [m for m in policy.model.modules() if hasattr(m, "attention_dropout") or hasattr(m, "jitter_noise")]
    assert len(noisy) == 4
    for module in noisy:
        module.attention_dropout = module.jitter_noise = 0.5
    layer = policy.model.model.layers[0]
    layer.input_layernorm = torch.nn.Sequential(layer.input_layernorm, torch.nn.Dropout(0.5)).eval()
    inputs, decisions = sampled(policy)
    before = logprobs(policy, inputs, decisions)
    policy.train()
    assert not torch.equal(logprobs(policy, inputs, decisions), before), "it is random before"
    policy.prepare_training(PolicyConfig(), LoraConfig(), 0)
    assert torch.equal(logprobs(policy.train(), inputs, decisions), before)


@pytest.mark.parametrize("kind", MODELS)
def test_a_saved_folder_loads_with_the_library_and_with_us(folder_of, kind, tmp_path):
    policy = read_policy(folder_of(kind))
    inputs, decisions = sampled(policy)
    step(policy, inputs, decisions)
    expected = logprobs(policy, inputs, decisions)
    policy.save(tmp_path / "saved")
    torch.testing.assert_close(logprobs(read_policy(tmp_path / "saved"), inputs, decisions), expected, rtol=0, atol=0)
    auto = AutoModelForImageTextToText if kind in WITH_IMAGES else AutoModelForCausalLM
    theirs, report = auto.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("a<|im_end|>") == [64, 258]
    written = {file.name for file in (tmp_path / "saved").iterdir()}
    assert {file.name for file in folder_of(kind).iterdir()} <= written


def test_a_saved_folder_names_the_type_that_its_weights_were_rounded_to(folder_of, tmp_path):
    for kind in ("qwen3", "qwen2_5_vl"):  # one with a head tied to its embedding
        policy = read_policy(folder_of(kind))
        policy.save(tmp_path / kind, torch.bfloat16)
        auto = AutoModelForImageTextToText if kind in WITH_IMAGES else AutoModelForCausalLM
        model = auto.from_pretrained(tmp_path / kind)
        assert model.dtype == torch.bfloat16
        original = policy.model.state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, original[name].to(torch.bfloat16)), name
        assert json.loads((tmp_path / kind / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "smolvlm", "qwen2", "mixtral"])
def test_adapters_are_trained_saved_and_loaded(folder_of, kind, tmp_path):
    policy = read_policy(folder_of(kind))
    inputs, decisions = sampled(policy)
    base = logprobs(policy, inputs, decisions)
    policy.prepare_training(PolicyConfig(), LORA, 3)
    assert policy.has_adapter and all(".lora_" in n for n, p in policy.named_parameters() if p.requires_grad)
    torch.testing.assert_close(logprobs(policy, inputs, decisions), base, rtol=0, atol=0)
    for _ in range(2):
        step(policy, inputs, decisions)
    trained = logprobs(policy, inputs, decisions)
    assert float(trained.sum()) > float(base.sum()) + 0.05, "the texts became likelier"
    with policy.without_adapters():
        torch.testing.assert_close(logprobs(policy, inputs, decisions), base, rtol=0, atol=0)
    policy.save(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))
    again = read_policy(tmp_path / "adapter")
    assert again.has_adapter
    torch.testing.assert_close(logprobs(again, inputs, decisions), trained, rtol=0, atol=0)
    again.fold_adapter()
    again.save(tmp_path / "folded")
    torch.testing.assert_close(
        logprobs(read_policy(tmp_path / "folded"), inputs, decisions), trained, rtol=1e-4, atol=1e-4
    )


def test_an_adapter_is_refused_on_other_weights(folder_of, tmp_path):
    policy = read_policy(folder_of("qwen2"))
    policy.prepare_training(PolicyConfig(), LORA, 3)
    policy.save(tmp_path / "adapter")
    with pytest.raises(ValueError, match="holds other weights"):
        read_policy(tmp_path / "adapter", base=str(folder_of("llama")))


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_a_frozen_vision_tower_gets_no_gradient_and_no_adapter(folder_of, kind):
    policy = read_policy(folder_of(kind))
    policy.prepare_training(PolicyConfig(freeze="vision"), LoraConfig(), 0)
    frozen = [n for n, p in policy.named_parameters() if not p.requires_grad]
    assert frozen and all("visual" in n or "vision_model" in n for n in frozen)
    assert not any("visual" in n or "vision_model" in n for n, p in policy.named_parameters() if p.requires_grad)
    adapted = read_policy(folder_of(kind))
    adapted.prepare_training(PolicyConfig(freeze="vision"), LORA, 0)
    layers = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert layers and not any("visual" in n or "vision_model" in n for n in layers)


def test_what_can_not_be_trained_as_configured_is_refused(folder_of):
    policy = read_policy(folder_of("qwen2"))
    with pytest.raises(UsageError, match=r"policy.freeze = 'vision': this model has no vision tower"):
        policy.prepare_training(PolicyConfig(freeze="vision"), LoraConfig(), 0)
    half = read_policy(folder_of("qwen2"), dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="policy.dtype = 'bfloat16' without adapters"):
        half.prepare_training(PolicyConfig(), LoraConfig(), 0)
    with pytest.raises(UsageError, match="policy.unnorm_key = 'x'"):
        policy.use_statistics("x", "prompts")


def test_bfloat16_trains_float32_adapters_and_agrees_with_itself(folder_of):
    """bfloat16 rounds at 2^-9: sampling and scoring differ by a few roundings of the logits, not more."""
    policy = read_policy(folder_of("qwen2_5_vl"), dtype=torch.bfloat16)
    policy.prepare_training(PolicyConfig(dtype="bfloat16"), LORA, 0)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    inputs, decisions = sampled(policy)
    found = policy.evaluate(inputs, decisions, 1.0)
    assert found.logprobs.dtype == torch.float32
    largest = float(decisions.engine_logprobs.abs().max())
    gap = (found.logprobs.detach() - decisions.engine_logprobs)[decisions.mask].abs()
    assert float(gap.max()) < 16 * 2**-8 * largest
    before = float(found.logprobs.detach().sum())
    for _ in range(2):
        step(policy, inputs, decisions)
    assert float(logprobs(policy, inputs, decisions).sum()) > before


def test_gradient_checkpointing_leaves_gradients_as_they_are(folder_of):
    found = []
    for enabled in (False, True):
        policy = read_policy(folder_of("qwen2_5_vl"))
        policy.prepare_training(PolicyConfig(gradient_checkpointing=enabled), LoraConfig(), 0)
        assert policy.model.is_gradient_checkpointing == enabled
        inputs, decisions = sampled(policy)
        policy.train()
        policy.evaluate(inputs, decisions, 1.0).logprobs.sum().backward()
        found.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 40
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=0, msg=name)


# The critic


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2"])
def test_values_of_tokens_are_read_before_each_token(folder_of, kind):
    """Before a token is sampled its value is known: it does not depend on that token or later ones."""
    policy = read_policy(folder_of(kind))
    policy.attach_value_head((8,), 0, "token")
    torch.nn.init.normal_(policy.value_head.out.weight)
    inputs, decisions = sampled(policy)
    values = policy.evaluate(inputs, decisions, 1.0).values
    assert values.shape == decisions.mask.shape
    torch.testing.assert_close(policy.values(inputs, decisions), values)
    first = policy.values(inputs)
    assert first.shape == (4, 1)
    torch.testing.assert_close(values[:, :1], first, rtol=1e-4, atol=1e-5)
    row = int(decisions.sample.length.argmax())
    ids = decisions.sample.ids.clone()
    ids[row, 2] = (ids[row, 2] + 1) % 200
    other = policy.evaluate(inputs, replace(decisions, sample=replace(decisions.sample, ids=ids)), 1.0).values
    torch.testing.assert_close(other[row, :3], values[row, :3], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(other[row, 3], values[row, 3], atol=1e-4)


@pytest.mark.parametrize("level", ["chunk", "step"])
def test_the_value_of_a_text_is_that_of_its_prompt(folder_of, level):
    policy = read_policy(folder_of("qwen2"))
    policy.attach_value_head((8,), 0, level)
    inputs, decisions = sampled(policy)
    values = policy.evaluate(inputs, decisions, 1.0).values
    assert values.shape == (4, 1) and values.dtype == torch.float32
    torch.testing.assert_close(policy.values(inputs, decisions), values, rtol=1e-4, atol=1e-5)
    alone = torch.cat([policy.values(split(inputs)[i]) for i in range(4)])
    torch.testing.assert_close(alone, values, rtol=1e-4, atol=1e-5)


def test_a_critic_alone_moves_nothing_before_it(folder_of):
    policy = read_policy(folder_of("qwen2"))
    policy.attach_value_head((8,), 0, "token")
    inputs, decisions = sampled(policy)
    found = policy.evaluate(inputs, decisions, 1.0, critic_only=True)
    assert not found.logprobs.requires_grad
    found.values.square().sum().backward()
    moved = {n for n, p in policy.named_parameters() if p.grad is not None}
    assert moved and all(n.startswith("value_head.") for n in moved)


def test_the_critic_is_saved_and_loaded_and_can_be_removed(folder_of, tmp_path):
    policy = read_policy(folder_of("qwen2"))
    policy.attach_value_head((8, 4), 5)
    inputs, _ = sampled(policy)
    policy.save(tmp_path / "saved")
    again = read_policy(tmp_path / "saved")
    assert torch.equal(again.values(inputs), policy.values(inputs))
    assert again.attach_value_head((3,), 1) is again.value_head and again.value_head.hidden_sizes == (8, 4)
    again.detach_value_head()
    with pytest.raises(ValueError, match="no critic"):
        again.values(inputs)


def test_a_copy_runs_its_own_weights(folder_of):
    """As a separate critic is made: what is frozen is shared, what is trained is not."""
    policy = read_policy(folder_of("qwen2"))
    policy.prepare_training(PolicyConfig(), LORA, 0)
    critic = copy_sharing_frozen(policy)
    assert critic.access.model is critic.model and critic.model is not policy.model
    inputs, decisions = sampled(policy)
    before = logprobs(policy, inputs, decisions)
    step(critic, inputs, decisions)
    torch.testing.assert_close(logprobs(policy, inputs, decisions), before, rtol=0, atol=0)
    assert not torch.equal(logprobs(critic, inputs, decisions), before)
    whole = copy.deepcopy(policy)
    assert torch.equal(logprobs(whole, inputs, decisions), before)


def test_a_policy_without_weights_processes_prompts(folder_of):
    """As workers need it that prepare prompts for an engine elsewhere."""
    policy, whole = read_policy(folder_of("qwen2_5_vl"), device="meta"), read_policy(folder_of("qwen2_5_vl"))
    assert {p.device.type for p in policy.parameters()} == {"meta"}
    found, wanted = (each.process([observation("a", 2), observation("b")]) for each in (policy, whole))
    assert all(torch.equal(a, b) for a, b in zip(found.tensors(), wanted.tensors(), strict=True))
    texts = whole.sample(wanted, whole.noise([1, 2], SAMPLING), SAMPLING)
    assert policy.act(texts) == whole.act(texts)


def test_weights_that_changed_since_they_were_written_are_refused(folder_of, tmp_path):
    read_policy(folder_of("qwen2")).save(tmp_path / "saved")
    weights = tmp_path / "saved" / "model.safetensors"
    write_checksums(tmp_path / "saved", checksums(tmp_path / "saved", lambda name: name.endswith("safetensors")))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors"):
        read_policy(tmp_path / "saved")


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(folder_of):
    policy = read_policy(folder_of("qwen2"))
    policy.access.check_logits()
    policy.access._scale = 2.0
    with pytest.raises(UsageError, match="changes its logits in a way that is not supported"):
        policy.access.check_logits()


def test_logits_that_a_family_caps_or_scales_are_scored_as_the_library_does(tmp_path):
    """Gemma 2 caps its logits, Cohere and Granite scale them."""
    small = {k: v for k, v in TEXT_SIZES.items() if k != "bos_token_id"}
    for model in (
        Gemma2ForCausalLM(Gemma2Config(**small, final_logit_softcapping=2.0)),
        CohereForCausalLM(CohereConfig(**small, logit_scale=0.25)),
        GraniteForCausalLM(GraniteConfig(**small, logits_scaling=3.0)),
    ):
        access = ModelAccess(model.eval())
        access.check_logits()
        ids = torch.arange(5)[None]
        found = access.logits(access.run(ids, torch.ones_like(ids), ids).states)
        torch.testing.assert_close(found, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def test_an_encoder_decoder_is_refused():
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 30, "d_kv": 8}
    with pytest.raises(UsageError, match="encoder-decoder"):
        ModelAccess(T5ForConditionalGeneration(T5Config(**sizes)))


def test_an_unknown_architecture_is_refused(folder_of, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="neither a causal language model nor an image-text-to-text model"):
        read_policy(folder)


def test_given_texts_become_the_decisions_that_say_them(folder_of):
    policy = read_policy(folder_of("qwen2"))
    decisions = policy.decisions_of(["yes", "", "not at all"])
    assert policy.act(decisions) == ["yes", "", "not at all"]
    ends = [row[-1] for row in decisions.token_ids()]
    assert ends == [policy.stop_tokens[0]] * 3 and decisions.mask.sum(dim=1).tolist() == [4, 1, 11]


@pytest.mark.parametrize("kind", ["llama", "qwen2_5_vl"])
def test_imitated_texts_end_as_the_models_turns_do(folder_of, kind):
    """A model's list of end tokens may begin with another one, that of a document."""
    policy = read_policy(folder_of(kind))
    policy.model.generation_config.eos_token_id = [PAD, END]
    assert policy.decisions_of(["yes"]).token_ids()[0][-1] == END
    policy.processor.tokenizer.chat_template = policy.processor.processor.chat_template = None
    assert policy.decisions_of(["yes"]).token_ids()[0][-1] == END, "the tokenizer's own, without a template"
    policy.processor.tokenizer.eos_token = None
    assert policy.decisions_of(["yes"]).token_ids()[0][-1] == PAD, "the first, where nothing else says"


def test_imitated_texts_have_no_image_in_them(folder_of):
    """What a row of data holds is text, whatever it looks like: an image token would stand for an image."""
    policy = read_policy(folder_of("qwen2_5_vl"))
    decisions = policy.decisions_of(["a <|image_pad|> b <|im_end|>"])
    assert not set(decisions.token_ids()[0][:-1]) & {*IDS.values()} and policy.act(decisions) == [
        "a <|image_pad|> b <|im_end|>"
    ]
