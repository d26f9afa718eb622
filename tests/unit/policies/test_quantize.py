"""A base in 4 and 8 bits, at toy size on a CPU: the same layers as on a GPU, by bitsandbytes' own code."""

import sys
import weakref

import bitsandbytes as bnb
import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from torch import nn

from vlarl.errors import MissingExtraError
from vlarl.policies import weight_files
from vlarl.policies.openvla.checkpoint import read_policy
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.model import QUANTIZED, OpenVLAModel
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.quantize import quantize_linears
from vlarl.policies.tiny import initialize, tiny_config
from vlarl.policies.tiny_inputs import build_tiny_tokenizer
from vlarl.policies.weight_files import save_module, save_weights

BITS = (4, 8)
KINDS = {4: bnb.nn.Linear4bit, 8: bnb.nn.Linear8bitLt}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose rows are whole blocks of 64, with logits of order 1."""
    raw = tiny_config("parallel").raw
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = parse_config({**raw, "text_config": {**raw["text_config"], **sizes}})
    policy = OpenVLAPolicy(config, build_tiny_tokenizer())
    initialize(policy, torch.Generator().manual_seed(4))
    with torch.no_grad():
        policy.model.language_model.lm_head.weight.mul_(4.0)
    path = tmp_path_factory.mktemp("base") / "base"
    policy.save(path)
    return path


@pytest.fixture(params=BITS)
def bits(request):
    return request.param


def quantized_layers(policy):
    return {n: m for n, m in policy.model.named_modules() if isinstance(m, tuple(KINDS.values()))}


def dequantized(module):
    if isinstance(module, bnb.nn.Linear4bit):
        return dequantize_4bit(module.weight.data, module.weight.quant_state)
    scale = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
    return module.weight.data.float() * scale.unsqueeze(1) / 127


def logits_of(policy, observations):
    inputs = policy.process(observations)
    ids = torch.full((len(observations), policy.config.num_action_tokens), policy.codec.first_id)
    return policy.score(inputs, ids).logits


def relative(value, reference):
    return ((value - reference).norm() / reference.norm()).item()


def test_the_big_matrices_are_quantised_and_nothing_else(folder, bits):
    policy = read_policy(folder, quantize=bits)
    layers = quantized_layers(policy)
    assert all(isinstance(module, KINDS[bits]) for module in layers.values())
    kinds = {name.rpartition(".")[2] for name in layers}
    llama = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert kinds == llama | {"qkv", "proj", "fc1", "fc2", "fc3"}
    assert len(layers) == 3 * len(llama) + 2 * 5 * 4 + 3  # language layers, blocks of both towers, projector
    kept = {n for n, m in policy.model.named_modules() if isinstance(m, nn.Linear) and n not in layers}
    assert kept == {"language_model.lm_head"} | {
        f"vision_backbone.fused_featurizer.attn_pool.{part}" for part in ("q", "kv", "proj", "mlp.fc1", "mlp.fc2")
    }
    assert (policy.model.is_loaded_in_4bit, policy.model.is_loaded_in_8bit) == (bits == 4, bits == 8)
    assert policy.model.language_model.model.embed_tokens.weight.dtype == torch.float32
    assert not policy.model.projector.fc1.weight.requires_grad
    assert policy.model.projector.fc1.bias.requires_grad
    assert not any(tensor.is_meta for tensor in [*policy.parameters(), *policy.buffers()])


@pytest.mark.parametrize(("bits", "error"), [(4, (0.089, 0.097)), (8, (0.004, 0.012))])
def test_each_weight_is_what_nf4_or_int8_makes_of_it(folder, bits, error):
    # nf4 in blocks of 64 loses 9.2% of a normal weight; int8 by rows max / (127 sqrt 12), about 0.6% at these widths.
    original, policy = read_policy(folder), read_policy(folder, quantize=bits)
    for name, module in quantized_layers(policy).items():
        loss = relative(dequantized(module), original.model.get_submodule(name).weight)
        assert error[0] < loss < error[1], f"{name}: {loss}"


def test_logits_are_those_of_the_dequantised_weights(folder, bits, observe):
    observations = [observe(0), observe(1, "open the drawer")]
    original, policy = read_policy(folder), read_policy(folder, quantize=bits)
    twin = read_policy(folder)
    for name, module in quantized_layers(policy).items():
        twin.model.get_submodule(name).weight.data = dequantized(module).float()
    with torch.no_grad():
        exact, rounded, ours = (logits_of(p, observations) for p in (original, twin, policy))
    assert relative(ours, rounded) < 0.02  # products in bfloat16, or of int8 activations
    assert relative(ours, exact) < {4: 0.25, 8: 0.02}[bits]


def test_memory_is_a_quarter_and_a_half_of_bfloat16(folder, bits):
    policy = read_policy(folder, quantize=bits, dtype=torch.bfloat16)
    layer = policy.model.projector.fc1  # [1024, 256]
    if bits == 4:
        state = layer.weight.quant_state
        scales = [state.absmax, state.code, state.state2.absmax, state.state2.code]
    else:
        scales = [layer.weight.SCB]
    held = layer.weight.nbytes + sum(tensor.nbytes for tensor in scales)
    half_precision = 2 * layer.in_features * layer.out_features
    assert held / half_precision == pytest.approx({4: 0.25, 8: 0.5}[bits], rel=0.05)


def test_rows_that_are_no_whole_blocks_stay_in_full_precision(checkpoint):
    policy = read_policy(checkpoint, quantize=4)  # a width of 160
    assert type(policy.model.language_model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert isinstance(policy.model.projector.fc1, bnb.nn.Linear4bit)
    assert isinstance(read_policy(checkpoint, quantize=8).model.projector.fc3, bnb.nn.Linear8bitLt)


def test_one_weight_at_a_time_is_in_full_precision(folder, bits, monkeypatch):
    seen: list[weakref.ref] = []
    convert = weight_files.quantized

    def watched(empty, weight, device):
        assert not [ref for ref in seen if ref() is not None]
        seen.append(weakref.ref(weight))
        return convert(empty, weight, device)

    monkeypatch.setattr(weight_files, "quantized", watched)
    policy = read_policy(folder, quantize=bits, dtype=torch.bfloat16)
    assert len(seen) == len(quantized_layers(policy))


def test_a_quantised_base_is_never_written(folder, bits, tmp_path):
    model = read_policy(folder, quantize=bits).model
    remedy = r"weight is quantised to 4 or 8 bits.*merge it into the base in full precision \(vlarl merge"
    with pytest.raises(ValueError, match=remedy):
        save_weights(model.state_dict(), tmp_path)
    with pytest.raises(ValueError, match=remedy):
        save_module(model, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("prepare", [False, True])
def test_adapters_on_top_learn_and_leave_the_base_alone(folder, bits, prepare, observe):
    policy = read_policy(folder, quantize=bits, dtype=torch.bfloat16)
    base = {name: dequantized(module).clone() for name, module in quantized_layers(policy).items()}
    policy.requires_grad_(False)
    if prepare:
        peft.prepare_model_for_kbit_training(policy.model, use_gradient_checkpointing=False)
        policy.proprio_projector.float()  # what is not quantised is float32 now, and the states with it
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj", "blocks.0.attn.qkv", "fc3"])
    peft.inject_adapter_in_model(config, policy.model)
    adapted = [type(m).__name__ for m in policy.model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    assert set(adapted) == {f"Linear{bits}bit" + ("Lt" if bits == 8 else "")}
    trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trained)
    observations = [observe(0), observe(1, "open the drawer")]
    optimizer = torch.optim.Adam(trained.values(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = -logits_of(policy, observations).log_softmax(-1)[..., 17].mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    for name, module in quantized_layers(policy).items():
        assert torch.equal(dequantized(module), base[name.removesuffix(".base_layer")])


def test_a_pass_without_gradient_leaves_the_weights_trainable(folder, bits, observe):
    """An engine acts with the learner's own layers; on some CPUs bitsandbytes would repack them for inference."""
    observations = [observe(0), observe(1, "open the drawer")]

    def gradients(acts_before: bool) -> dict[str, torch.Tensor]:
        policy = read_policy(folder, quantize=bits)
        policy.requires_grad_(False)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "blocks.0.attn.qkv"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, policy.model)
        policy.eval()
        if acts_before:
            with torch.no_grad():
                logits_of(policy, observations)
        logits_of(policy, observations)[..., 17].sum().backward()
        return {name: p.grad for name, p in policy.model.named_parameters() if p.requires_grad}

    fresh, used = gradients(False), gradients(True)
    assert all(gradient.norm() > 0 for gradient in fresh.values())
    assert all(used[name].equal(gradient) for name, gradient in fresh.items())


def test_a_missing_package_and_other_bits_are_told(monkeypatch):
    with torch.device("meta"):
        model = OpenVLAModel(tiny_config())
    with pytest.raises(ValueError, match="a base in 3 bits is not possible: use 4 or 8"):
        quantize_linears(model, 3, QUANTIZED)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
    with pytest.raises(MissingExtraError, match=r"pip install -c constraints.txt -e '\.\[quant\]'"):
        quantize_linears(model, 4, QUANTIZED)
