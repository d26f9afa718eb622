"""Our parallel decoder against arrays computed with the original OpenVLA-OFT."""

import pytest
import torch
from comparisons import (
    LOGIT_TOLERANCE,
    OFT,
    OFT_CHECKS,
    Arrays,
    assert_close,
    check_oft_tokens,
    load_oft,
    load_oft_without_proprio,
    oft_inputs,
)

from vlarl.policies.distribution import greedy
from vlarl.policies.openvla.policy import OpenVLAPolicy


@pytest.fixture(scope="module")
def policy() -> OpenVLAPolicy:
    return load_oft()


@pytest.fixture(scope="module")
def without_proprio() -> OpenVLAPolicy:
    return load_oft_without_proprio()


@pytest.mark.parametrize("check", OFT_CHECKS)
def test_equals_the_original(policy, check):
    check(policy, Arrays(OFT / "expected.npz"))


def test_equals_the_original_without_proprio(without_proprio):
    check_oft_tokens(without_proprio, Arrays(OFT / "expected.npz"))


def test_every_golden_array_is_compared(policy, without_proprio):
    expected = Arrays(OFT / "expected.npz")
    for check in OFT_CHECKS:
        check(policy, expected)
    check_oft_tokens(without_proprio, expected)
    assert expected.read == set(expected)


def test_uint8_images_take_the_same_path_as_stacked_floats(policy):
    pixels = torch.randint(0, 256, (2, 2, 3, 56, 56), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    backbone = policy.model.vision_backbone
    floats = backbone.normalize(pixels)
    assert floats.shape == (2, 12, 56, 56)
    assert torch.equal(floats[:, 6:9], backbone.featurizer.normalize(pixels[:, 1]))
    assert_close(backbone(pixels), backbone(floats).detach().numpy(), 1e-6)


def test_proprio_is_inferred_from_the_component_file(policy):
    assert policy.config.use_proprio
    assert policy.chunk_length == 8


def test_batch_of_one_equals_its_row(policy):
    expected = Arrays(OFT / "expected.npz")
    one = oft_inputs(expected).rows(slice(1, 2))
    _, logits = policy.decode(one, lambda lg, _: greedy(lg))
    assert_close(logits, expected["token_action_logits"][1:], LOGIT_TOLERANCE)
