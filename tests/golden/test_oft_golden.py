"""Our parallel decoder against arrays computed with the original OpenVLA-OFT."""

from functools import partial

import numpy as np
import pytest
import torch
from comparisons import OFT, OFT_CHECKS, Model, check_oft_tokens, load_oft, oft_inputs, oft_logits
from fakes.golden_arrays import assert_close, load_arrays, unnoticed


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return load_arrays(OFT / "expected.npz")


@pytest.fixture(scope="module")
def model() -> Model:
    return load_oft()


@pytest.fixture(scope="module")
def without_proprio() -> Model:
    return load_oft(use_proprio=False)


@pytest.mark.parametrize("check", OFT_CHECKS)
def test_equals_the_original(model, expected, check):
    check(model, expected)


def test_equals_the_original_without_proprio(without_proprio, expected):
    check_oft_tokens(without_proprio, expected)


def test_every_golden_array_is_compared(model, without_proprio, expected):
    checks = [*(partial(check, model) for check in OFT_CHECKS), partial(check_oft_tokens, without_proprio)]
    assert unnoticed(expected, checks) == []


def test_uint8_images_take_the_same_path_as_stacked_floats(model):
    config, backbone = model.policy.config, model.policy.model.vision_backbone
    images, size, channels = config.num_images, config.image_size, 3 * len(config.towers)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (2, images, 3, size, size), generator=generator).to(torch.uint8)
    floats = backbone.normalize(pixels)
    assert floats.shape == (2, images * channels, size, size)
    last = floats[:, (images - 1) * channels :]
    assert torch.equal(last[:, :3], backbone.featurizer.normalize(pixels[:, -1]))
    assert_close(backbone(pixels), backbone(floats).detach().numpy(), 1e-6)


def test_proprio_is_inferred_from_the_component_file(model):
    assert model.policy.config.use_proprio


def test_batch_of_one_equals_its_row(model, expected):
    last = oft_inputs(expected).rows(slice(-1, None))
    model.assert_equal(lambda policy: oft_logits(policy, last), expected["token_action_logits"][-1:])
