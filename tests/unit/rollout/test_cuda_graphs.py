"""The assumption of recorded decoding: padding a batch changes no row. The recordings themselves need a GPU."""

import copy

import pytest
import torch
from fakes.float_error import check_logprobs

from vlarl.decisions import Sampling
from vlarl.rollout.engines.cuda_graphs import pad_batch
from vlarl.rollout.engines.torch import TorchEngine

INSTRUCTIONS = ("open the drawer", "put the zigzag bowl on the plate and close the drawer", "pick up the red cube")


@pytest.fixture
def inputs(policy, observation):
    return policy.process([observation(i, text) for i, text in enumerate(INSTRUCTIONS)])


def test_a_batch_is_padded_to_a_power_of_two_and_eight_columns(inputs):
    filled, noise = pad_batch(inputs, torch.rand(3, 7))
    assert len(filled) == 4 and len(noise) == 4
    assert filled.input_ids.shape[1] % 8 == 0 and filled.ragged
    assert torch.equal(filled.input_ids[:3, : inputs.input_ids.shape[1]], inputs.input_ids)
    assert torch.equal(filled.pixels[3], inputs.pixels[2])
    assert not filled.attention_mask[:, inputs.input_ids.shape[1] :].any()


def test_equal_prompts_are_not_padded(inputs):
    alike = inputs.rows(torch.tensor([1, 1]))
    filled, _ = pad_batch(alike, torch.rand(2, 7))
    assert filled.input_ids.shape == alike.input_ids.shape and not filled.ragged


def test_padded_rows_decode_as_they_do_alone(policy, inputs):
    noise = policy.noise([1, 2, 3], Sampling(1.0))
    plain, padded = (policy.sample(*given, Sampling(1.0)) for given in ((inputs, noise), pad_batch(inputs, noise)))
    assert len(padded) == 4 and torch.equal(padded.sample.ids[:3], plain.sample.ids)
    for found in (plain, padded.rows(slice(0, 3))):
        check_logprobs(found.engine_logprobs, policy, inputs, plain.sample.ids, 1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="recordings need a GPU")
def test_recorded_outputs_equal_those_of_a_plain_pass(policy, inputs):
    device, on_cpu = torch.device("cuda"), copy.deepcopy(policy)
    policy.to(device)
    plain, graphed = (TorchEngine(policy, device, cuda_graphs=on) for on in (False, True))
    for seeds in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):  # run, recorded, replayed
        expected, found = (engine.generate(inputs, Sampling(1.0), seeds) for engine in (plain, graphed))
        assert torch.equal(found.sample.ids, expected.sample.ids)
        for decisions in (expected, found):
            check_logprobs(decisions.engine_logprobs.cpu(), on_cpu, inputs, decisions.sample.ids.cpu(), 1.0)
