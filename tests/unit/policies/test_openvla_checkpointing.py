"""Layers recomputed in the backward pass: the same values, fewer saved activations."""

import pytest
import torch

from vlarl.policies.distribution import greedy
from vlarl.policies.openvla.decoders import DECODERS, embed_prefix
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.layers import DecoderLayer
from vlarl.policies.openvla.model import OpenVLAModel
from vlarl.policies.openvla.vision import Block
from vlarl.policies.tiny import init_tiny


@pytest.fixture
def batch() -> OpenVLAInputs:
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[1, 300, 301, 302], [1, 303, 304, 3]])
    pixels = torch.randint(0, 256, (2, 1, 3, 56, 56), generator=generator).to(torch.uint8)
    return OpenVLAInputs(ids, ids != 3, pixels, None)


def tiny_model(decoder: str) -> OpenVLAModel:
    policy = init_tiny(decoder, use_proprio=False)
    model = OpenVLAModel(policy.config.with_decoder(use_film=decoder == "parallel"))
    model.load_state_dict(policy.model.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".scale." in name or ".shift." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def loss_and_gradients(model: OpenVLAModel, batch: OpenVLAInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor], list]:
    calls = []
    hooks = [
        module.register_forward_pre_hook(lambda m, _: calls.append(type(m)))
        for module in model.modules()
        if isinstance(module, DecoderLayer | Block)
    ]
    decoder = DECODERS[model.config.decoder](model.config.num_action_tokens)
    tokens = torch.full((2, model.config.num_action_tokens), 800)
    model.zero_grad()
    loss = decoder.states(model, embed_prefix(model, batch, None), tokens).square().sum()
    loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, calls


@pytest.mark.parametrize("decoder", ["parallel", "autoregressive"])
def test_loss_and_gradients_are_equal_to_the_bit(decoder, batch):
    model = tiny_model(decoder).train()
    loss, gradients, once = loss_and_gradients(model, batch)
    model.checkpoint_layers(True)
    again, recomputed, twice = loss_and_gradients(model, batch)
    assert torch.equal(loss, again)
    assert gradients.keys() == recomputed.keys()
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)
    for kind in (DecoderLayer, Block):
        assert once.count(kind) > 0
        assert twice.count(kind) == 2 * once.count(kind)


def test_it_can_be_switched_off_and_leaves_evaluation_alone(batch):
    model = tiny_model("parallel").train()
    *_, once = loss_and_gradients(model, batch)
    model.checkpoint_layers(True)
    assert len(loss_and_gradients(model.eval(), batch)[2]) == len(once)
    model.checkpoint_layers(False)
    assert len(loss_and_gradients(model.train(), batch)[2]) == len(once)


@torch.no_grad()
def test_generation_keeps_its_cache_while_training(batch):
    model = tiny_model("autoregressive").train()
    decoder = DECODERS["autoregressive"](7)
    places, logits = decoder.generate(model, embed_prefix(model, batch, None), lambda lg, _: greedy(lg))
    model.checkpoint_layers(True)
    again, with_it = decoder.generate(model, embed_prefix(model, batch, None), lambda lg, _: greedy(lg))
    assert torch.equal(places, again)
    assert torch.equal(logits, with_it)
