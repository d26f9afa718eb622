"""Attention implementations agree, whatever the decoder and however ragged the prompts."""

import sys
from types import ModuleType

import pytest
import torch
from fakes.float_error import FloatJudge, check_gradients, exactly, in_float64

from vlarl.policies.openvla.attention import AttentionMask, prepare
from vlarl.policies.openvla.decoders import DECODERS, embed_prefix
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.language import build_language_model
from vlarl.policies.openvla.model import OpenVLAModel
from vlarl.policies.tiny import init_tiny


def dense(q, k, v, causal=False):
    """flash_attn_func as documented: [B, T, H, D], fewer heads of keys, causal masks aligned at the bottom right."""
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if causal:
        queries, keys = scores.shape[2:]
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    """flash_attn_varlen_func: rows one after the other, [tokens, H, D]."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max()) == (max_seqlen_q, max_seqlen_k)
    ends = zip(
        cu_seqlens_q.tolist()[:-1],
        cu_seqlens_q.tolist()[1:],
        cu_seqlens_k.tolist()[:-1],
        cu_seqlens_k.tolist()[1:],
        strict=True,
    )
    return torch.cat([dense(q[None, a:b], k[None, c:d], v[None, c:d], causal)[0] for a, b, c, d in ends])


@pytest.fixture
def flash_attn(monkeypatch) -> ModuleType:
    fake = ModuleType("flash_attn")
    fake.calls = []
    fake.flash_attn_func = lambda *a, **k: fake.calls.append("dense") or dense(*a, **k)
    fake.flash_attn_varlen_func = lambda *a, **k: fake.calls.append("varlen") or varlen(*a, **k)
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    return fake


def inputs(lengths) -> OpenVLAInputs:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(262, 768, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    pixels = torch.randint(0, 256, (len(lengths), 1, 3, 56, 56), generator=generator).to(torch.uint8)
    return OpenVLAInputs(ids, mask, pixels, None)


def model_of(decoder: str, attention: str) -> OpenVLAModel:
    policy = init_tiny(decoder, use_proprio=False)
    model = OpenVLAModel(policy.config, attention)
    model.load_state_dict(policy.model.state_dict())
    return model


def answers(decoder: str, model: OpenVLAModel, batch: OpenVLAInputs) -> list[torch.Tensor]:
    """Scores of given tokens, the critic's state, and a generation with its cache."""
    policy = init_tiny(decoder, use_proprio=False)
    reader = DECODERS[decoder](policy.config.num_action_tokens)
    prefix = embed_prefix(model, batch, None)
    tokens = torch.randint(
        768, 1024, (len(batch), policy.config.num_action_tokens), generator=torch.Generator().manual_seed(1)
    )
    given = tokens - 768
    places, logits = reader.generate(model, prefix, lambda lg, first: given[:, first : first + lg.shape[1]])
    assert torch.equal(places, given)
    return [reader.states(model, prefix, tokens), reader.first_state(model, prefix), logits]


def judges(decoder: str, batch: OpenVLAInputs) -> list[FloatJudge]:
    """The formula as it is written decides."""
    eager = model_of(decoder, "eager")
    exact, plain = exactly(eager, lambda model: answers(decoder, model, batch)), answers(decoder, eager, batch)
    return [FloatJudge.of(*pair) for pair in zip(exact, plain, strict=True)]


@pytest.mark.parametrize("lengths", [(5, 5), (7, 3, 5)])
@pytest.mark.parametrize("decoder", ["parallel", "autoregressive"])
def test_sdpa_equals_eager(decoder, lengths):
    batch = inputs(lengths)
    for judge, sdpa in zip(judges(decoder, batch), answers(decoder, model_of(decoder, "sdpa"), batch), strict=True):
        judge.check(sdpa)


@pytest.mark.parametrize("lengths", [(5, 5), (7, 3, 5)])
@pytest.mark.parametrize("decoder", ["parallel", "autoregressive"])
def test_flash_equals_eager_and_never_sees_padding(decoder, lengths, flash_attn):
    batch = inputs(lengths)
    found = answers(decoder, model_of(decoder, "flash_attention_2"), batch)
    for judge, flash in zip(judges(decoder, batch), found, strict=True):
        judge.check(flash)
    assert set(flash_attn.calls) == {"dense" if lengths == (5, 5) else "varlen"}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("columns", [(0, 6), (2, 4), (3, 6), (5, 6)])
def test_any_queries_see_the_same(columns, padded, causal, flash_attn):
    """Grouped heads; queries at the end, in the middle, all, one."""
    generator = torch.Generator().manual_seed(0)
    start, stop = columns
    q = torch.randn(2, 4, stop - start, 8, generator=generator)
    k, v = (torch.randn(2, 2, 6, 8, generator=generator) for _ in range(2))
    seen = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool) if padded else None
    mask = AttentionMask(start, stop, 6, seen, causal)
    eager = prepare("eager", mask, q.device)
    real = torch.ones(2, stop - start, dtype=torch.bool) if seen is None else seen[:, start:stop]

    def mixed(attend, *tensors: torch.Tensor) -> torch.Tensor:
        return attend(*tensors).transpose(1, 2)[real]

    with in_float64():
        exact = mixed(eager, q.double(), k.double(), v.double())
    judge = FloatJudge.of(exact, mixed(eager, q, k, v), scale=float(v.abs().max()))
    for name in ("sdpa", "flash_attention_2"):
        judge.check(mixed(prepare(name, mask, q.device), q, k, v))


def test_flash_is_differentiable(flash_attn):
    seen = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)

    given = torch.randn(3, 2, 2, 4, 8, generator=torch.Generator().manual_seed(0))

    def gradients(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        tensors = {part: tensor.to(dtype).requires_grad_() for part, tensor in zip("qkv", given.clone(), strict=True)}
        mixed = prepare(name, AttentionMask(0, 4, 4, seen, True), seen.device)(*tensors.values())
        mixed.transpose(1, 2)[seen].square().sum().backward()
        return {part: tensor.grad for part, tensor in tensors.items()}

    with in_float64():
        exact = gradients("eager", torch.float64)
    check_gradients(gradients("flash_attention_2", torch.float32), exact, gradients("eager", torch.float32))


def test_a_missing_package_and_a_wrong_name_are_told(monkeypatch):
    text = init_tiny().config.text
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # what Python does for a package that is not there
    with pytest.raises(ValueError, match="pip install flash-attn --no-build-isolation"):
        build_language_model(text, "flash_attention_2")
    with pytest.raises(ValueError, match="'flash' is unknown: use one of sdpa, eager, flash_attention_2"):
        build_language_model(text, "flash")
