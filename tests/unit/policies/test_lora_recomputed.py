"""Adapters in layers that are recomputed: the same gradients, and no product whose result nothing reads."""

import pytest
import torch
from torch.nn import functional as F

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.policies.load import load_policy
from vlarl.policies.lora import LoraLinear
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.probe import probe_input
from vlarl.policies.tiny import init_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    init_tiny("autoregressive", seed=3).save(folder)
    return folder


def adapted(folder, dtype: str) -> OpenVLAPolicy:
    policy = load_policy(folder, dtype=dtype)
    policy.prepare_training(ModelConfig(dtype=dtype, gradient_checkpointing=True), LoraConfig(enabled=True), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    return policy.train()


def gradients(policy: OpenVLAPolicy) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    policy.score(*probe_input(policy.config)).logits.square().sum().backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [0, 2, 99])
def test_gradients_are_those_of_kept_activations_to_the_bit(folder, dtype, kept):
    policy = adapted(folder, dtype)
    policy.model.checkpoint_layers(False)
    expected = gradients(policy)
    policy.model.checkpoint_layers(True, kept)
    found = gradients(policy)
    assert found.keys() == expected.keys() and all(gradient.any() for gradient in found.values())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_first_layers_are_recomputed_and_without_their_last_product(folder, monkeypatch):
    """Each linear layer's product with its weight is computed once, and a second time where it is recomputed."""
    policy = adapted(folder, "bfloat16")
    names = {module: name for name, module in policy.model.named_modules() if isinstance(module, LoraLinear)}
    gradients(policy)  # from here on weights are beside their adapters' columns
    owner = {module.operands(torch.bfloat16).wide.data_ptr(): name for module, name in names.items()}
    products: list[str] = []
    linear = F.linear

    def counted(x, weight, bias=None):
        products.extend([owner[weight.data_ptr()]] if weight.data_ptr() in owner else [])
        return linear(x, weight, bias)

    monkeypatch.setattr("vlarl.policies.lora.F.linear", counted)
    layers = [f"language_model.model.layers.{i}" for i in range(policy.model.num_layers)]
    policy.model.checkpoint_layers(True, kept=1)
    gradients(policy)
    first, last = layers[0], layers[-1]
    assert [products.count(f"{first}.self_attn.{name}_proj") for name in "qkvo"] == [2] * 4
    assert [products.count(f"{first}.mlp.{name}_proj") for name in ("gate", "up", "down")] == [2, 2, 1]
    assert [products.count(f"{last}.mlp.{name}_proj") for name in ("gate", "up", "down")] == [1, 1, 1]
    tower = "vision_backbone.fused_featurizer.blocks.0"  # without LayerScale, which saves its factors after the product
    assert [products.count(f"{tower}.mlp.{name}") for name in ("fc1", "fc2")] == [2, 1]


def test_cached_operands_follow_adapters_however_they_were_changed(folder):
    """In place, since a recording reads them where they are."""
    policy = adapted(folder, "bfloat16")
    gradients(policy)
    layers = [module for module in policy.model.modules() if isinstance(module, LoraLinear)]
    places = [[part.data_ptr() for part in layer.operands(torch.bfloat16)[2:4]] for layer in layers]
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1.5)  # which no version counter notices
    policy.weights_changed()
    for layer, place in zip(layers, places, strict=True):
        kept = [part.clone() for part in layer.operands(torch.bfloat16)[2:4]]
        assert [part.data_ptr() for part in layer.operands(torch.bfloat16)[2:4]] == place
        rank = layer.r["default"]
        assert torch.equal(kept[0][:rank], layer.lora_A["default"].weight.bfloat16()) and not kept[0][rank:].any()
        assert torch.equal(kept[1][:, :rank], layer.lora_B["default"].weight.bfloat16())
