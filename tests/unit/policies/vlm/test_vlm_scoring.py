"""Log-probs and entropies are those of the library's logits in float64, and what is masked sends no gradient."""

from dataclasses import replace

import pytest
import torch
from fakes.decisions import split
from fakes.text_judge import judges
from fakes.vlm_models import MIXTURES, MODELS, TEXT_ONLY, WITH_IMAGES, observation

from vlarl.decisions import Decisions, Sampling
from vlarl.policies.vlm.scoring import chunk_size, score_texts

SAMPLING = Sampling(1.0, max_tokens=7, stop=tuple(range(60)))
FACTOR = 4.0


def sampled(policy, sampling=SAMPLING, count=6):
    images = (0, 1, 3) if policy.processor.reads_images else (0,)
    observations = [observation("what is it? " * (i % 4 + 1), images[i % len(images)], i) for i in range(count)]
    inputs = policy.process(observations)
    return inputs, policy.sample(inputs, policy.noise(range(count), sampling), sampling)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", MODELS)
def test_log_probs_are_those_of_a_full_softmax_in_float64(shared, kind, temperature):
    policy = shared(kind)
    inputs, decisions = sampled(policy, replace(SAMPLING, temperature=temperature))
    logprobs, entropy = judges(policy, inputs, decisions, temperature)
    found = policy.evaluate(inputs, decisions, temperature)
    logprobs.check(found.logprobs[decisions.mask], FACTOR)
    logprobs.check(decisions.engine_logprobs[decisions.mask], FACTOR)
    entropy.check(found.entropy[decisions.mask], FACTOR)
    assert len(set(decisions.sample.length.tolist())) > 1, "texts of several lengths"


def test_top_p_and_top_k_leave_log_probs_those_of_the_whole_vocabulary(shared):
    policy = shared("qwen2")
    inputs, decisions = sampled(policy, replace(SAMPLING, top_k=3, top_p=0.8, min_tokens=2))
    logprobs, _ = judges(policy, inputs, decisions, 1.0)
    logprobs.check(decisions.engine_logprobs[decisions.mask], FACTOR)
    logprobs.check(policy.evaluate(inputs, decisions, 1.0).logprobs[decisions.mask], FACTOR)


def test_greedy_texts_are_scored_at_temperature_one(shared):
    policy = shared("qwen3")
    inputs, decisions = sampled(policy, Sampling(0.0, max_tokens=5))
    logprobs, _ = judges(policy, inputs, decisions, 1.0)
    logprobs.check(decisions.engine_logprobs[decisions.mask], FACTOR)


def gradients(policy, loss):
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: g for name, g in zip(trained, found, strict=True) if g is not None}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "smolvlm", "llama"])
def test_padding_sends_no_gradient_and_changes_none(shared, kind):
    """The gradient of a batch is the sum of those of its rows alone, whatever their padding holds."""
    policy = shared(kind)
    inputs, decisions = sampled(policy)
    weights = torch.rand(decisions.mask.shape, generator=torch.Generator().manual_seed(1))
    noisy = torch.where(decisions.mask, decisions.sample.ids, 77)
    decisions = replace(decisions, sample=replace(decisions.sample, ids=noisy))
    together = gradients(policy, (policy.evaluate(inputs, decisions, 1.0).logprobs * weights)[decisions.mask].sum())
    apart = {name: torch.zeros_like(g) for name, g in together.items()}
    for row in range(len(inputs)):
        one, text = split(inputs)[row], split(decisions)[row]
        logprobs = policy.evaluate(one, text, 1.0).logprobs
        for name, gradient in gradients(policy, (logprobs * weights[row])[text.mask].sum()).items():
            apart[name] += gradient
    largest = max(float(g.abs().max()) for g in apart.values())
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, apart[name], rtol=1e-3, atol=1e-4 * largest, msg=name)


def test_masked_tokens_send_no_gradient_not_even_where_they_overflow(shared):
    """Of a text that is masked as a whole nothing is computed, and a pass of nothing else still runs backwards."""
    policy = shared("qwen2")
    inputs, decisions = sampled(policy)
    none = replace(decisions, mask=torch.zeros_like(decisions.mask))
    found = policy.evaluate(inputs, none, 1.0)
    assert not found.logprobs.any() and not found.entropy.any()
    assert all(not g.any() for g in gradients(policy, found.logprobs.sum()).values())
    half = replace(decisions, mask=decisions.mask & (torch.arange(6) < 3)[:, None])
    head = policy.model.get_output_embeddings()
    width = int(half.mask.sum())
    hook = head.register_forward_hook(lambda _, given, logits: logits if len(given[0]) == width else logits * torch.inf)
    result = gradients(policy, policy.evaluate(inputs, half, 1.0).logprobs.sum())
    hook.remove()
    assert all(g.isfinite().all() for g in result.values()), "only counted tokens have logits"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_chunks_give_what_one_whole_gives(size):
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(3, 5, 16, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.nn.Linear(16, 40, bias=False).double()
    ids = torch.randint(0, 40, (3, 5), generator=generator)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    widths = []
    hook = head.register_forward_hook(lambda _, given, __: widths.append(len(given[0])))
    logprobs, entropy = score_texts(states, ids, mask, lambda x: head(x), 0.8, size=size, entropy_gradient=True)
    (logprobs.sin().sum() + entropy.square().sum()).backward()
    assert max(widths) <= size
    hook.remove()
    found, states.grad = states.grad, None
    whole = (head(states) / 0.8).float().log_softmax(-1)
    expected = torch.where(mask, whole.gather(-1, ids[..., None]).squeeze(-1), 0.0)
    expected_entropy = torch.where(mask, -(whole.exp() * whole).sum(-1), 0.0)
    (expected.sin().sum() + expected_entropy.square().sum()).backward()
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(found, states.grad, rtol=1e-4, atol=1e-6)


def test_the_policy_scores_in_chunks_and_no_tensor_of_all_positions_exists(shared):
    policy = shared("qwen2_5_vl")
    inputs, decisions = sampled(policy)
    whole = policy.evaluate(inputs, decisions, 1.0)
    assert policy.positions_at_once == chunk_size(288) > 1000
    sizes = []
    hook = policy.model.get_output_embeddings().register_forward_hook(lambda _, __, out: sizes.append(out.shape))
    try:
        policy.positions_at_once = 4
        chunked = policy.evaluate(inputs, decisions, 1.0)
        forward = list(sizes)
        chunked.logprobs.sum().backward()
    finally:
        policy.positions_at_once = chunk_size(288)
        policy.zero_grad(set_to_none=True)
        hook.remove()
    total = int(decisions.mask.sum())
    assert [s[0] for s in forward] == [4] * (total // 4) + ([total % 4] if total % 4 else [])
    assert len(sizes) == 2 * len(forward), "computed again in the backward pass"
    torch.testing.assert_close(chunked.logprobs, whole.logprobs, rtol=1e-5, atol=1e-5)
    assert not whole.entropy.requires_grad
    assert policy.evaluate(inputs, decisions, 1.0, entropy_gradient=True).entropy.requires_grad


def test_a_chunk_is_bounded_in_bytes():
    assert chunk_size(151_936) * 151_936 * 4 <= 128 << 20 and chunk_size(151_936) > 200
    assert chunk_size(10**9) == 1


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_load_balance_loss_is_the_librarys(shared, kind):
    """Of prompt and text together, as the library computes it for a padded batch."""
    policy = shared(kind)
    inputs, decisions = sampled(policy)
    found = policy.evaluate(inputs, decisions, 1.0).aux_loss
    texts = [
        torch.cat([inputs.ids[r][inputs.attention_mask[r]], decisions.sample.ids[r, : decisions.sample.length[r]][:-1]])
        for r in range(len(inputs))
    ]
    width = max(map(len, texts))
    ids = torch.stack([torch.nn.functional.pad(text, (0, width - len(text))) for text in texts])
    mask = torch.stack([torch.arange(width) < len(text) for text in texts]).long()
    expected = policy.model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gates = [name for name in gradients(policy, found) if "gate.weight" in name]
    assert gates, "it trains the router"


@pytest.mark.parametrize("kind", [*TEXT_ONLY, *WITH_IMAGES])
def test_dense_models_report_no_auxiliary_loss(shared, kind):
    policy = shared(kind)
    inputs, decisions = sampled(policy, count=2)
    assert policy.evaluate(inputs, decisions, 1.0).aux_loss is None


def test_rows_in_another_order_and_another_batch_score_the_same(shared):
    policy = shared("qwen3_vl")
    inputs, decisions = sampled(policy)
    whole = policy.evaluate(inputs, decisions, 1.0).logprobs
    order = torch.tensor([4, 0, 5, 2])
    part = policy.evaluate(inputs.rows(order), decisions.rows(order), 1.0).logprobs
    joined = type(inputs).cat([split(inputs)[i] for i in order.tolist()])
    again = policy.evaluate(joined, Decisions.cat([split(decisions)[i] for i in order.tolist()]), 1.0).logprobs
    torch.testing.assert_close(part, whole[order], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, part[:, : again.shape[1]], rtol=1e-4, atol=1e-4)
