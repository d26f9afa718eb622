"""Passes with a cache of a fixed size give the texts and log-probs of passes with the library's own."""

import copy

import pytest
import torch
from fakes.text_judge import check_texts
from fakes.vlm_models import MODELS, WITH_IMAGES, observation

from vlarl.decisions import Sampling
from vlarl.policies.vlm.decisions import text_decisions
from vlarl.policies.vlm.generation import generate
from vlarl.policies.vlm.token_passes import FixedPasses, GrowingPasses, allows_fixed_passes
from vlarl.rollout.engines.torch import TorchEngine

FACTOR = 4.0  # of the error that float32 itself makes over the whole vocabulary
FIXED = {"qwen2_5_vl", "qwen3_vl", "qwen2", "llama", "qwen3"}
SAMPLED = Sampling(1.0, max_tokens=14)


def prompts(kind):
    counts = (0, 1, 2) if kind in WITH_IMAGES else (0,)
    return [observation("red cubes " * (1 + index % 3), counts[index % len(counts)], index) for index in range(7)]


def test_models_whose_passes_depend_on_their_tokens_have_no_fixed_cache(shared):
    assert {kind for kind in MODELS if allows_fixed_passes(shared(kind).access)} == FIXED


def test_a_model_with_sliding_attention_has_no_fixed_cache(shared):
    policy = copy.deepcopy(shared("qwen2"))
    policy.access.text_config.layer_types = ["full_attention", "sliding_attention"]
    assert not allows_fixed_passes(policy.access)
    mistral = copy.deepcopy(shared("llama"))  # its layers have no types
    mistral.access.text_config.sliding_window = 16
    assert not allows_fixed_passes(mistral.access)


@pytest.mark.parametrize("kind", sorted(FIXED))
@pytest.mark.parametrize("columns", [2, 3, 16])  # enlarged after 2, 6 and 14 tokens; after 3 and 9; never
def test_texts_of_a_fixed_cache_are_those_of_a_growing_one(shared, kind, columns):
    policy = shared(kind)
    inputs = policy.process(prompts(kind))
    assert len(set(inputs.lengths.tolist())) > 1  # rows are padded
    noise, stops = policy.noise(range(7), SAMPLED), policy.stops(SAMPLED)
    prefix = policy.access.prefix(inputs)
    ways = (GrowingPasses(policy.access, prefix), FixedPasses(policy.access, prefix, record=False, columns=columns))
    growing, fixed = (text_decisions(*generate(policy.access, prefix, way, noise, SAMPLED, stops)) for way in ways)
    assert torch.equal(fixed.sample.ids, growing.sample.ids)
    check_texts(policy, inputs, fixed, 1.0, FACTOR)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="recordings need a GPU")
@pytest.mark.parametrize("kind", sorted(FIXED))
def test_recorded_passes_give_the_texts_of_plain_ones(shared, kind):
    device, policy = torch.device("cuda"), copy.deepcopy(shared(kind))
    inputs = policy.process(prompts(kind))
    policy.to(device)
    plain, recorded = (TorchEngine(policy, device, cuda_graphs=on) for on in (False, True))
    for first in (0, 7):
        policy.records_passes = False
        expected = plain.generate(inputs, SAMPLED, range(first, first + 7))
        policy.records_passes = True
        found = recorded.generate(inputs, SAMPLED, range(first, first + 7))
        assert torch.equal(found.sample.ids, expected.sample.ids)
        check_texts(shared(kind), inputs, found.to("cpu"), 1.0, FACTOR)
