"""The fast parts of the language model against transformers' own."""

import pytest
import torch

import vlarl.policies.openvla.language as language
from vlarl.policies.openvla.llama import RMSNorm, rotate
from vlarl.policies.tiny import tiny_config


def library_model(monkeypatch, text):
    monkeypatch.setattr(language, "use_fast_layers", lambda _: None)
    return language.build_language_model(text)


def test_states_and_gradients_equal_the_librarys(monkeypatch):
    text = {**tiny_config().text, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 500.0}
    fast = language.build_language_model(text)
    slow = library_model(monkeypatch, text)
    slow.load_state_dict(fast.state_dict())
    embeds = torch.randn(2, 9, 160, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(9).unsqueeze(0)
    upstream = slow.model(inputs_embeds=embeds, use_cache=False).last_hidden_state  # its own causal forward
    for model in (fast, slow):
        states = language.run_layers(model, embeds, ids, mask=None, causal=True, read=slice(0, 9))
        torch.testing.assert_close(model.model.norm(states), upstream, atol=2e-5, rtol=1e-4)
        states.square().sum().backward()
    theirs = dict(slow.named_parameters())
    for name, parameter in fast.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=2e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("fast", [True, False])
def test_bidirectional_mask_is_honoured(monkeypatch, fast):
    text = tiny_config().text
    model = language.build_language_model(text) if fast else library_model(monkeypatch, text)
    embeds = torch.randn(1, 6, 160, generator=torch.Generator().manual_seed(0))
    changed = embeds.clone()
    changed[:, 5] += 1.0
    positions = torch.arange(6).unsqueeze(0)
    seen = torch.ones(1, 1, 1, 6, dtype=torch.bool)
    hidden = seen.clone()
    hidden[..., 5] = False

    def first_state(x, mask, causal=False):
        return language.run_layers(model, x, positions, mask=mask, causal=causal, read=slice(0, 1))[:, 0]

    assert (first_state(embeds, None) - first_state(changed, None)).abs().max() > 1e-4
    assert (first_state(embeds, seen) - first_state(changed, seen)).abs().max() > 1e-4
    assert torch.equal(first_state(embeds, hidden), first_state(changed, hidden))
    assert torch.equal(first_state(embeds, None, True), first_state(changed, None, True))


def test_gradients_of_norm_and_rotation_are_right():
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(1, 3, 1, 4, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 3, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: rotate(t, angles.cos(), angles.sin()), x)
    norm = RMSNorm(8, 1e-6)
    torch.nn.init.normal_(norm.weight)
    sample = torch.randn(5, 3, 8, generator=generator)
    grads = []
    for forward in (norm, lambda t: torch.nn.functional.rms_norm(t, (8,), norm.weight, 1e-6)):
        norm.zero_grad()
        leaf = sample.clone().requires_grad_()
        forward(leaf).pow(3).sum().backward()
        grads.append((leaf.grad, norm.weight.grad.clone()))
    torch.testing.assert_close(grads[0], grads[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("read", [slice(0, 7), slice(3, 6), slice(4, 7), slice(6, 7)])
@pytest.mark.parametrize("masked", [True, False])
def test_reading_some_columns_equals_reading_all_and_choosing(monkeypatch, causal, read, masked):
    text = tiny_config().text
    fast, slow = language.build_language_model(text), library_model(monkeypatch, text)
    slow.load_state_dict(fast.state_dict())
    embeds = torch.randn(2, 7, 160, generator=torch.Generator().manual_seed(0))
    mask = None
    if masked:
        mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)[:, None, None]
        mask = mask & torch.ones(7, 7, dtype=torch.bool).tril() if causal else mask
    arguments = {"mask": mask, "causal": causal and not masked, "read": read}
    ours, theirs = (language.run_layers(m, embeds, torch.arange(7)[None], **arguments) for m in (fast, slow))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
