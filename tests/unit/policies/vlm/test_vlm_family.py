"""Language and vision-language models as a family of policies: found by their config, loaded, refused, described."""

import json
import shutil

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from fakes.vlm_models import MODELS, TEXT_SIZES, observation
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.decisions import Sampling
from vlarl.errors import UsageError
from vlarl.export.merge import merge
from vlarl.policies.load import describe_checkpoint, family_of, load_policy, refuse_other_kind
from vlarl.policies.vlm.family import VlmFamily
from vlarl.policies.vlm.generation import DEFAULT_MAX_TOKENS
from vlarl.policies.vlm.memory import PROMPT_LENGTH
from vlarl.policies.vlm.model import ModelAccess
from vlarl.policies.vlm.policy import VlmPolicy
from vlarl.policies.vlm.processor import prompt_of

LORA = LoraConfig(enabled=True, rank=4)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_found_by_its_architecture(folder_of, kind):
    assert isinstance(family_of(folder_of(kind)), VlmFamily)
    policy = load_policy(folder_of(kind))
    assert isinstance(policy, VlmPolicy) and policy.has_aux_loss == (kind in ("qwen3_moe", "mixtral"))


def test_a_model_with_another_head_is_refused_with_what_it_is(folder_of, tmp_path):
    shutil.copytree(folder_of("qwen2"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    changed = {**config, "architectures": ["Qwen2ForSequenceClassification"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(
        UsageError, match=r"\['Qwen2ForSequenceClassification'\] is neither a causal language model nor"
    ):
        load_policy(tmp_path / "model")


def test_options_of_robots_are_refused_all_at_once(folder_of):
    message = r"policy.chunk_length = 4, policy.center_crop = True: it is for policies of robots.*leave it out"
    with pytest.raises(UsageError, match=message):
        load_policy(folder_of("qwen2"), chunk_length=4, center_crop=True)
    with pytest.raises(UsageError, match="policy.num_images = 2"):
        describe_checkpoint(folder_of("qwen2"), num_images=2)


def test_weights_that_are_missing_or_do_not_fit_are_refused_and_described(folder_of, tmp_path):
    """The library would initialise them at random, with a line in its log."""
    folder = tmp_path / "model"
    shutil.copytree(folder_of("qwen2_5_vl"), folder)
    weights = load_file(folder / "model.safetensors")
    removed = next(name for name in weights if name.endswith("layers.0.mlp.down_proj.weight"))
    cut = next(name for name in weights if name.endswith("layers.1.mlp.down_proj.weight"))
    del weights[removed]
    weights[cut] = weights[cut][:, :3].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = r"don't fit its config.json; missing \(1\): .*layers.0.mlp.down_proj.weight; of another shape \(1\): "
    for device in ("cpu", "meta"):
        with pytest.raises(UsageError, match=message):
            load_policy(folder, device=device)
    (problem,) = describe_checkpoint(folder).problems
    assert "layers.0.mlp.down_proj.weight" in problem and "(32, 3) for (32, 48)" in problem


def test_weights_that_are_stored_quantised_are_refused(folder_of, tmp_path):
    shutil.copytree(folder_of("qwen2"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    changed = {**config, "quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(UsageError, match="stored quantised: take the original ones, and set policy.quantize"):
        load_policy(tmp_path / "model")


def without_runs(folder, bits, monkeypatch) -> VlmPolicy:
    """A quantised policy whose model has not run, not even for the check of its logits."""
    with monkeypatch.context() as context:
        context.setattr(ModelAccess, "check_logits", lambda self: None)
        return load_policy(folder, quantize=bits)


@torch.no_grad()
def round_like(exact, policy) -> int:
    """Give an exact model the weights of a quantised one, which has not run yet: bitsandbytes lays them out otherwise
    then. How many layers are quantised."""
    count = 0
    for name, layer in policy.model.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            weight = layer.weight.CB.float() * layer.weight.SCB.float()[:, None] / 127
        else:
            continue
        exact.model.get_submodule(name).weight.copy_(weight)
        count += 1
    return count


@pytest.mark.parametrize("kind", ["wide", "qwen2_5_vl"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_computes_with_its_rounded_weights_and_trains_adapters(folder_of, monkeypatch, kind, bits):
    sizes = TEXT_SIZES | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # rows of whole blocks
    monkeypatch.setitem(MODELS, "wide", lambda _: Qwen2ForCausalLM(Qwen2Config(**sizes)))
    exact, policy = load_policy(folder_of(kind)), without_runs(folder_of(kind), bits, monkeypatch)
    assert policy.bits == bits
    original = exact.probe_logits()
    rounded = round_like(exact, policy)
    assert rounded > (10 if kind == "wide" or bits == 8 else 0)
    expected, found = exact.probe_logits(), policy.probe_logits()
    # Products in bfloat16, or of inputs in 8 bits, are off by about 2^-8 in each of a dozen layers.
    assert float((found - expected).norm()) < 12 * 2**-8 * float(expected.norm())
    assert float((expected - original).norm()) > 1e-3 * float(original.norm()), "it is quantised at all"
    with pytest.raises(UsageError, match=f"policy.quantize = {bits} without adapters"):
        policy.prepare_training(ModelConfig(quantize=bits), LoraConfig(), 0)
    policy = load_policy(folder_of(kind), quantize=bits)
    policy.prepare_training(ModelConfig(quantize=bits), LORA, 0)
    names = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert names and all("lora_" in name for name in names)
    inputs = policy.process([observation("count", 1 if kind == "qwen2_5_vl" else 0)])
    policy.evaluate(inputs, policy.decisions_of(["two"]), 1.0).logprobs.sum().backward()
    moved = [weight for name, weight in policy.named_parameters() if "lora_B" in name and weight.grad is not None]
    assert moved and any(float(weight.grad.abs().max()) > 0 for weight in moved)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_5_vl", "qwen3"])
def test_a_merged_adapter_is_read_by_the_library_with_the_same_logits(folder_of, kind, tmp_path):
    policy = load_policy(folder_of(kind))
    policy.prepare_training(ModelConfig(), LORA, 0)
    policy.attach_value_head((4,))
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    policy.save(tmp_path / "adapter")
    result = merge(tmp_path / "adapter", tmp_path / "merged")
    assert result.logit_error < 1e-4
    auto = AutoModelForImageTextToText if kind == "qwen2_5_vl" else AutoModelForCausalLM
    ids = torch.arange(7)[None]
    with torch.no_grad():
        theirs = auto.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        ours, base = policy.eval().model(input_ids=ids).logits, load_policy(folder_of(kind)).model(input_ids=ids).logits
    # Folding adds each product to its weight once: float32's rounding of as many products as there are layers.
    assert float((theirs - ours).abs().max()) < 1e-5 * float(ours.abs().max())
    assert float((ours - base).abs().max()) > 0.1, "the adapter does something"
    assert not (tmp_path / "merged" / "value_head.safetensors").exists(), "only training reads it"
    assert (load_policy(tmp_path / "merged").probe_logits() - policy.probe_logits()).abs().max() < 1e-4


def test_an_adapter_without_weights_has_its_adapters(folder_of, tmp_path):
    policy = load_policy(folder_of("qwen2"))
    policy.prepare_training(ModelConfig(), LORA, 0)
    policy.save(tmp_path / "adapter")
    empty = load_policy(tmp_path / "adapter", device="meta")
    assert empty.has_adapter and empty.adapter_sizes() == policy.adapter_sizes()
    assert len(empty.process([observation("count")])) == 1


def test_a_description_counts_what_there_is(folder_of):
    policy, found = load_policy(folder_of("qwen2_5_vl")), describe_checkpoint(folder_of("qwen2_5_vl"))
    whole = sum(weight.numel() for weight in policy.parameters())
    assert found.stored.num_parameters == whole and not found.problems and found.reads_images
    assert found.estimate_rollout(1, "float32").weights == 4 * whole
    # Two layers with keys and values of two heads of eight values each, for every token of prompt and text
    cache = 2 * 2 * 2 * 8 * (PROMPT_LENGTH + DEFAULT_MAX_TOKENS)
    assert found.estimate_rollout(3, "bfloat16").cache == 3 * cache * 2
    policy.prepare_training(ModelConfig(), LORA, 0)
    adapters = sum(weight.numel() for name, weight in policy.named_parameters() if "lora_" in name)
    update = found.estimate_lora_update(2, "float32", LORA.rank, False)
    assert (update.adapters, update.optimizer) == (4 * adapters, 8 * adapters)
    less = found.estimate_lora_update(2, "float32", LORA.rank, True)
    assert less.activations < update.activations and less.weights == update.weights
    assert found.estimate_lora_update(2, "float32", LORA.rank, False, 8).weights < update.weights
    content = json.loads(json.dumps(found.to_json()))
    assert (content["kind"], content["vision"]["layers"], content["max_positions"]) == (
        "vision-language model",
        2,
        4096,
    )


def test_a_description_of_an_adapter_is_of_its_base(folder_of, tmp_path):
    policy = load_policy(folder_of("qwen2"))
    policy.prepare_training(ModelConfig(), LORA, 0)
    policy.save(tmp_path / "adapter")
    found = describe_checkpoint(tmp_path / "adapter")
    assert found.adapter is not None and (found.kind, found.adapter.rank) == ("LoRA adapter", 4)
    assert found.stored == describe_checkpoint(folder_of("qwen2")).stored


def test_a_policy_of_another_kind_is_refused_before_it_is_loaded(folder_of):
    with pytest.raises(UsageError, match="writes texts, and tabletop_goal takes a robot's actions; set env.suite to"):
        refuse_other_kind(str(folder_of("qwen2")), None, "tabletop_goal")
    for path in ("builtin:tiny-oft", "init:tiny-oft"):
        with pytest.raises(UsageError, match="acts on a robot, and prompts need texts; name a language or"):
            refuse_other_kind(path, None, "prompts_shapes")
    refuse_other_kind(str(folder_of("qwen2")), None, "prompts")
    refuse_other_kind("builtin:tiny-oft", None, "tabletop_goal")


def test_values_of_sampling_that_the_model_can_not_use_are_refused(shared):
    policy = shared("qwen2")
    policy.check_sampling(Sampling(max_tokens=96), prompt_tokens=4000)
    with pytest.raises(UsageError, match="prompts of 4001 tokens and rollout.max_tokens = 96: the model reads 4096"):
        policy.check_sampling(Sampling(max_tokens=96), prompt_tokens=4001)
    with pytest.raises(UsageError, match=r"rollout.stop_token_ids = \[288\]: .* ids 0 to 287"):
        policy.check_sampling(Sampling(stop=(1, 288)))
    inputs = policy.process([observation("word " * 20)])
    with pytest.raises(UsageError, match="drop long prompts with prompts.max_tokens"):
        policy.sample(inputs, policy.noise([0], Sampling(max_tokens=4090)), Sampling(max_tokens=4090))


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_the_length_of_a_prompt_is_that_of_its_tokens(shared, kind):
    policy = shared(kind)
    counts = (0, 1, 3) if kind != "qwen2" else (0,)
    seen = [observation("how many " * (1 + n), count, seed=n) for n in range(4) for count in counts]
    lengths = policy.process(seen).lengths.tolist()
    assert [policy.prompt_length(prompt_of(each)) for each in seen] == lengths
    assert len(set(lengths)) > len(counts)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
@pytest.mark.parametrize("count", [0, 2])
def test_a_prompt_that_can_not_be_processed_has_no_length(shared, kind, count):
    policy = shared(kind)
    wrong = observation(f"how many {policy.processor.processor.image_token}", count)
    with pytest.raises(UsageError):
        policy.process([wrong])
    with pytest.raises(UsageError, match=r"the prompt \('how many .*has tokens of images in its text: take them out"):
        policy.prompt_length(prompt_of(wrong))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "smolvlm"])
def test_rows_without_images_give_the_vision_tower_a_gradient_of_zero_if_others_have_some(folder_of, kind):
    """All ranks must run the same layers: where one has images, none may leave the tower out."""
    policy = load_policy(folder_of(kind))
    inputs = policy.process([observation("one", 1), observation("none"), observation("none at all")])
    decisions = policy.decisions_of(["a", "bc", "d"])
    plain = policy.process([observation("none"), observation("none at all")])
    found = policy.evaluate(inputs.rows(slice(1, 3)), decisions.rows(slice(1, 3)), 1.0)
    expected = policy.evaluate(plain, decisions.rows(slice(1, 3)), 1.0)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
    found.logprobs.sum().backward()
    tower = dict(policy.model.get_encoder(modality="image").named_parameters())
    assert tower and all(weight.grad is not None and not weight.grad.any() for weight in tower.values())
