"""The fast parts of the language model against transformers' own, for each family."""

import pytest
import torch
from fakes.float_error import FloatJudge, check_gradients, exactly, gradients_of
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from vlarl.policies.openvla.config import language_config
from vlarl.policies.openvla.language import KeyValueCache, build_language_model, run_layers
from vlarl.policies.openvla.layers import RMSNorm, rotate

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 500.0,
}
FAMILIES = {
    "llama": {"model_type": "llama", "head_dim": 16, **SIZES},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": 16, **SIZES},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True, **SIZES},
}


def fast_and_library(text):
    """Two models with the same random weights, norms and biases included: ours, and the library's with its own layers."""
    fast = build_language_model(text)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in fast.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.1 * torch.randn(parameter.shape, generator=generator))
    library = AutoModelForCausalLM.from_config(language_config(text), attn_implementation="sdpa", dtype=torch.float32)
    missing, unexpected = library.load_state_dict(fast.state_dict(), strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if text.get("tie_word_embeddings") else [])
    return fast, library.eval()


def logits(fast, ids, seen=None):
    size = ids.shape[1]
    positions = torch.arange(size).unsqueeze(0)
    embeds = fast.model.embed_tokens(ids)
    states = run_layers(fast, embeds, positions, seen=seen, causal=True, read=slice(0, size))
    return fast.lm_head(fast.model.norm(states))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_the_librarys(family):
    fast, library = fast_and_library(FAMILIES[family])
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(1))

    def answer(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found = logits(model, ids) if model is fast else model(ids, use_cache=False).logits
        found.square().sum().backward()
        return found, gradients_of(model)

    (exact, exact_gradients), (plain, plain_gradients) = exactly(library, answer), answer(library)
    ours, our_gradients = answer(fast)
    FloatJudge.of(exact, plain).check(ours)
    check_gradients(our_gradients, exact_gradients, plain_gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_equal_the_librarys(family):
    fast, library = fast_and_library(FAMILIES[family])
    ids = torch.randint(0, 96, (3, 9), generator=torch.Generator().manual_seed(1))
    seen = torch.arange(9)[None] < torch.tensor([[9], [4], [7]])

    def theirs(model) -> torch.Tensor:
        return model(ids, attention_mask=seen.long(), use_cache=False).logits[seen]

    FloatJudge.of(exactly(library, theirs), theirs(library)).check(logits(fast, ids, seen)[seen])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("read", [slice(0, 7), slice(3, 6), slice(4, 7), slice(6, 7)])
@pytest.mark.parametrize("padded", [True, False])
def test_reading_some_columns_equals_the_librarys_output_there(family, causal, read, padded):
    fast, library = fast_and_library(FAMILIES[family])
    embeds = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0))
    seen = torch.tensor([[1, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool) if padded else None
    everything = torch.ones(7, 7, dtype=torch.bool)
    mask = (everything.tril() if causal else everything)[None, None].expand(2, 1, 7, 7)
    mask = mask if seen is None else mask & seen[:, None, None]

    def theirs(model) -> torch.Tensor:
        found = model.model(inputs_embeds=embeds.to(model.dtype), attention_mask=mask, use_cache=False)
        return found.last_hidden_state[:, read]

    ours = run_layers(fast, embeds, torch.arange(7)[None], seen=seen, causal=causal, read=read)
    FloatJudge.of(exactly(library, theirs), theirs(library)).check(fast.model.norm(ours))


def test_a_cache_continues_where_it_stopped():
    fast, _ = fast_and_library(FAMILIES["qwen2"])
    embeds = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0))

    def whole(model) -> torch.Tensor:
        return run_layers(
            model, embeds.to(model.dtype), torch.arange(7)[None], seen=None, causal=True, read=slice(4, 7)
        )

    cache = KeyValueCache(3, 7)
    run_layers(fast, embeds[:, :4], torch.arange(4)[None], seen=None, causal=True, read=slice(3, 4), cache=cache)
    positions = torch.arange(4, 7)[None]
    rest = run_layers(fast, embeds[:, 4:], positions, seen=None, causal=True, read=slice(0, 3), cache=cache)
    FloatJudge.of(exactly(fast, whole), whole(fast)).check(rest)


def test_what_a_text_config_leaves_out_is_the_librarys_default():
    for name, kind in (("llama", LlamaConfig), ("mistral", MistralConfig), ("qwen2", Qwen2Config)):
        assert language_config({"model_type": name, "vocab_size": 7}).to_dict() == kind(vocab_size=7).to_dict()
    assert language_config(FAMILIES["qwen2"]).rope_parameters["rope_theta"] == 500.0


def test_a_sequence_longer_than_the_sliding_window_is_refused():
    text = FAMILIES["mistral"]
    model = build_language_model(text)
    embeds = torch.zeros(1, 17, 64)
    with pytest.raises(ValueError, match="17 tokens is longer than the language model's sliding window of 16"):
        run_layers(model, embeds, torch.arange(17)[None], seen=None, causal=True, read=slice(0, 17))
    cache = KeyValueCache(3, 20)
    step = {"seen": None, "causal": True, "cache": cache}
    run_layers(model, embeds[:, :16], torch.arange(16)[None], read=slice(15, 16), **step)
    with pytest.raises(ValueError, match="17 tokens"):
        run_layers(model, embeds[:, :1], torch.tensor([[16]]), read=slice(0, 1), **step)


def test_a_tied_head_has_no_weight_of_its_own_and_stays_tied():
    model = build_language_model(FAMILIES["qwen2 tied"])
    state = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    assert "lm_head.weight" not in state
    model.load_state_dict(state, assign=True)
    assert torch.equal(model.lm_head(torch.ones(1, 64)), torch.full((1, 96), 64.0))


def test_gradients_of_norm_and_rotation_are_right():
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(1, 3, 1, 4, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 3, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: rotate(t, angles.cos(), angles.sin()), x)
    norm = RMSNorm(8, 1e-6)
    torch.nn.init.normal_(norm.weight)
    sample = torch.randn(5, 3, 8, generator=generator)

    def gradients(dtype: torch.dtype, forward) -> dict[str, torch.Tensor]:
        leaf, weight = (t.detach().to(dtype).requires_grad_() for t in (sample, norm.weight))
        forward(leaf, weight).pow(3).sum().backward()
        return {"input": leaf.grad, "weight": weight.grad}

    def library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    plain = gradients(torch.float32, library)
    check_gradients(gradients(torch.float32, ours), gradients(torch.float64, library), plain)
