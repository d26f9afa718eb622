"""Samples that are laid end to end score as they do alone: log-probs, entropies, values, losses and gradients."""

import copy
from dataclasses import replace

import pytest
import torch
from fakes.float_error import CEILING, EPS, FloatJudge, check_gradients, exactly
from fakes.text_judge import judges
from fakes.vlm_models import MIXTURES, MODELS, TEXT_SIZES, WITH_IMAGES
from test_vlm_scoring import FACTOR, sampled
from transformers import MistralConfig, MistralForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from vlarl.decisions import Sampling
from vlarl.errors import UsageError
from vlarl.policies.vlm import packing
from vlarl.policies.vlm.model import ModelAccess
from vlarl.policies.vlm.packing import EACH_SAMPLE
from vlarl.policies.vlm.policy import VlmPolicy

HIDDEN = (16,)


def packed(policy: VlmPolicy) -> VlmPolicy:
    """A copy that packs."""
    made = copy.deepcopy(policy)
    made.use_packing()
    return made


@pytest.mark.parametrize("kind", MODELS)
def test_packed_log_probs_are_those_of_each_sample_alone_in_float64(shared, kind):
    """Prompts of several lengths with 0, 1 and 3 images, texts of several lengths."""
    policy = packed(shared(kind))
    inputs, decisions = sampled(policy)
    logprobs, entropy = judges(shared(kind), inputs, decisions, 0.7)
    found = policy.evaluate(inputs, decisions, 0.7)
    logprobs.check(found.logprobs[decisions.mask], FACTOR)
    entropy.check(found.entropy[decisions.mask], FACTOR)
    assert found.tokens.read == found.tokens.computed == int(inputs.lengths.sum() + (decisions.sample.length - 1).sum())
    assert not found.logprobs[~decisions.mask].any()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_librarys_own_masks_keep_samples_apart_too(shared, attention):
    """What other attention than PyTorch's gets: positions that start again, and before them those of images."""
    for kind in ("qwen2", "qwen2_5_vl"):
        policy = packed(shared(kind))
        policy.model.set_attn_implementation(attention)
        assert policy.access.text_config._attn_implementation == attention != EACH_SAMPLE
        inputs, decisions = sampled(policy)
        logprobs, _ = judges(shared(kind), inputs, decisions, 1.0)
        logprobs.check(policy.evaluate(inputs, decisions, 1.0).logprobs[decisions.mask], FACTOR)


def loss_of(policy, inputs, decisions, weights):
    """Of everything that an evaluation says."""
    found = policy.evaluate(inputs, decisions, 1.0, entropy_gradient=True)
    kept = torch.where(decisions.mask, found.logprobs + 0.3 * found.entropy, 0.0)
    total = (weights.to(kept) * kept).sum() + (weights[:, : found.values.shape[1]].to(kept) * found.values).sum()
    return total if found.aux_loss is None else total + found.aux_loss


def gradients(policy, *given):
    if policy.model.dtype == torch.float64 and policy.access.is_mixture:
        policy.model.set_experts_implementation("eager")  # the kernels of the others know no float64
    policy.zero_grad(set_to_none=True)
    loss = loss_of(policy, *given)
    loss.backward()
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach().reshape(1)}


@pytest.mark.parametrize("level", ["chunk", "token"])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_of_padded_rows(shared, kind, level):
    """The padded pass in float64 decides, and its own error in float32 is the measure."""
    policy = copy.deepcopy(shared(kind))
    policy.attach_value_head(HIDDEN, seed=1, level=level)
    inputs, decisions = sampled(policy)
    weights = torch.rand(decisions.mask.shape, generator=torch.Generator().manual_seed(1)) * decisions.mask
    exact = exactly(policy, lambda p: gradients(p, inputs, decisions, weights))
    plain = gradients(policy, inputs, decisions, weights)
    found = gradients(packed(policy), inputs, decisions, weights)
    scale = max(float(g.abs().max()) for g in exact.values())
    FloatJudge.of(exact.pop("loss"), plain.pop("loss"), scale).check(found.pop("loss"), FACTOR)
    check_gradients(found, exact, plain)


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_rows_without_images_among_others_that_have_some(shared, kind):
    """Their pass runs the vision tower on a row of its own, which counts nothing: its gradient is zero."""
    policy = packed(shared(kind))
    inputs, decisions = sampled(policy)
    rows = torch.tensor([3, 0])
    bare, texts = inputs.rows(rows), decisions.rows(rows)
    assert bare.pixel_values is not None and not bare.pixel_values.counts.any()
    logprobs, _ = judges(shared(kind), bare, texts, 1.0)
    found = policy.evaluate(bare, texts, 1.0)
    logprobs.check(found.logprobs[texts.mask], FACTOR)
    assert found.tokens.read == int(bare.lengths.sum() + (texts.sample.length - 1).sum()) < found.tokens.computed
    found.logprobs.sum().backward()
    tower = policy.model.get_encoder(modality="image")
    assert all(p.grad is not None and not p.grad.any() for p in tower.parameters())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "smolvlm", "llama"])
def test_values_are_those_of_padded_rows(shared, kind):
    policy = copy.deepcopy(shared(kind))
    policy.attach_value_head(HIDDEN, seed=1, level="token")
    inputs, decisions = sampled(policy)
    judge = FloatJudge.of(
        exactly(policy, lambda p: p.values(inputs, decisions)), policy.values(inputs, decisions), scale=1.0
    )
    policy.use_packing()
    judge.check(policy.values(inputs, decisions), FACTOR)
    judge.check(policy.evaluate(inputs, decisions, 1.0).values, FACTOR)
    first = replace(judge, exact=judge.exact[:, :1])  # of the whole text, and of a prompt that no text follows
    policy.level = "chunk"
    first.check(policy.values(inputs, decisions), FACTOR)
    first.check(policy.evaluate(inputs, decisions, 1.0).values, FACTOR)
    first.check(policy.values(inputs), FACTOR)


@pytest.mark.parametrize("kind", ["qwen3_vl", "llama"])
def test_a_sample_does_not_see_what_it_is_packed_with(shared, kind):
    """To the bit: other prompts and texts in the other rows change nothing."""
    policy = packed(shared(kind))
    inputs, decisions = sampled(policy)
    last = len(inputs) - 1
    ids = decisions.sample.ids.clone()
    ids[:last] = torch.where(decisions.mask[:last], (ids[:last] + 11) % 200, 0)
    others = replace(decisions, sample=replace(decisions.sample, ids=ids))
    first, second = (policy.evaluate(inputs, each, 1.0).logprobs for each in (decisions, others))
    assert torch.equal(first[last], second[last])
    assert not torch.equal(first[:last], second[:last])


@pytest.mark.parametrize("kind", MIXTURES)
def test_padding_does_not_count_in_the_load_balance_loss(shared, kind):
    """It is that of the tokens that are read, padded or packed, whatever the padding holds."""
    policy = shared(kind)
    inputs, decisions = sampled(policy)
    padded = float(policy.evaluate(inputs, decisions, 1.0).aux_loss.detach())
    noisy = replace(inputs, ids=torch.where(inputs.attention_mask, inputs.ids, 99))
    noisy_texts = torch.where(decisions.mask, decisions.sample.ids, 98)
    noisy_decisions = replace(decisions, sample=replace(decisions.sample, ids=noisy_texts))
    for other, given in ((policy, (noisy, noisy_decisions)), (packed(policy), (inputs, decisions))):
        found = float(other.evaluate(*given, 1.0).aux_loss.detach())
        assert abs(found - padded) <= CEILING * EPS * padded, "more than rounding"


def test_how_much_of_a_padded_pass_is_padding_is_counted(shared):
    policy = shared("qwen2")
    inputs, decisions = sampled(policy)
    found = policy.evaluate(inputs, decisions, 1.0).tokens
    longest = int(inputs.lengths.max() + decisions.sample.length.max() - 1)
    assert found.computed == len(inputs) * longest
    assert found.read == int(inputs.lengths.sum() + (decisions.sample.length - 1).sum()) < found.computed


def test_a_packing_policy_samples_as_before(shared):
    policy = shared("qwen2_5_vl")
    sampling = Sampling(1.0, max_tokens=6)
    inputs, before = sampled(policy, sampling)
    after = packed(policy).sample(inputs, policy.noise(range(len(inputs)), sampling), sampling)
    assert torch.equal(before.sample.ids, after.sample.ids)
    assert torch.equal(before.engine_logprobs, after.engine_logprobs)


def with_model(policy, config, model, **options):
    """The policy with a tiny model of another family in place of its own."""
    changed = copy.deepcopy(policy)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        changed.model = model(config(**TEXT_SIZES | options, attn_implementation="sdpa")).eval()
    changed.access = ModelAccess(changed.model)
    return changed


def test_windows_of_attention_are_kept_within_a_sample(shared):
    """A window that is shorter than the samples: each token sees the last three of its own sample."""
    policy = with_model(shared("llama"), MistralConfig, MistralForCausalLM, sliding_window=3)
    inputs, decisions = sampled(policy)
    logprobs, _ = judges(policy, inputs, decisions, 1.0)
    policy.use_packing()
    assert policy.access.text_config._attn_implementation == "sdpa", "the library's masks know windows"
    logprobs.check(policy.evaluate(inputs, decisions, 1.0).logprobs[decisions.mask], FACTOR)


def test_models_that_carry_a_state_through_the_row_are_refused(shared, monkeypatch):
    sizes = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    sizes |= {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }
    policy = with_model(shared("llama"), Qwen3NextConfig, Qwen3NextForCausalLM, **sizes)
    with pytest.raises(UsageError, match="optim.packing.*linear_attention.*Set optim.packing to false"):
        policy.use_packing()
    # Of a family that does not name its layers, the samples show it.
    monkeypatch.setattr(packing, "KNOWN_LAYERS", packing.KNOWN_LAYERS | {"linear_attention"})
    with pytest.raises(UsageError, match="Qwen3NextForCausalLM can't be packed: its log-probs would change"):
        policy.use_packing()
    assert not policy.packing


def test_a_model_whose_samples_would_see_each_other_is_refused(shared, monkeypatch):
    policy = copy.deepcopy(shared("qwen2_5_vl"))
    monkeypatch.setattr(policy.access, "has_grid_positions", False)  # two rows of positions: the model makes no mask
    policy.model.set_attn_implementation("eager")
    with pytest.raises(UsageError, match="as if samples attended to each other"):
        policy.use_packing()


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_a_model_whose_images_need_a_mask_of_their_own_is_refused(shared, monkeypatch, kind):
    """As in Gemma 4, whose images are read in both directions: texts alone would not show it."""
    policy = copy.deepcopy(shared(kind))
    run = policy.access.run

    def run_otherwise(ids, mask, positions, extra=None, **options):
        found = run(ids, mask, positions, extra, **options)
        sees_ahead = mask is not None and "pixel_values" in (extra or {})
        return replace(found, states=found.states.flip(-1)) if sees_ahead else found

    monkeypatch.setattr(policy.access, "run", run_otherwise)
    with pytest.raises(UsageError, match="optim.packing.*its log-probs would change"):
        policy.use_packing()
    assert not policy.packing
