"""Our parallel decoder against arrays computed with the original OpenVLA-OFT."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vlarl.policies.distribution import greedy
from vlarl.policies.openvla.decoders import embed_prefix
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.types import PolicyInput

FOLDER = Path(__file__).parent / "openvla-oft-tiny"
LOGIT_TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "expected.npz"))


@pytest.fixture(scope="module")
def with_proprio() -> OpenVLAPolicy:
    return OpenVLAPolicy.load(FOLDER, decoder="parallel", num_images=2, l1_head=True)


@pytest.fixture(scope="module")
def without_proprio() -> OpenVLAPolicy:
    return OpenVLAPolicy.load(FOLDER, decoder="parallel", num_images=2, use_proprio=False)


@pytest.fixture(scope="module")
def inputs(expected: dict[str, np.ndarray]) -> PolicyInput:
    """The golden pixels are normalised already, which the vision backbone takes as floats."""
    ids = torch.from_numpy(expected["input_ids"])
    pixels, proprio = (torch.from_numpy(expected[key]) for key in ("pixel_values", "proprio_normalized"))
    return PolicyInput(ids, torch.ones(ids.shape, dtype=torch.bool), pixels, proprio)


def assert_close(ours: torch.Tensor | np.ndarray, theirs: np.ndarray, tolerance: float) -> None:
    ours = ours.detach().numpy() if isinstance(ours, torch.Tensor) else ours
    assert ours.shape == theirs.shape
    difference = np.abs(ours.astype(np.float64) - theirs).max()
    assert difference <= tolerance, f"largest difference {difference}"


def test_uint8_images_take_the_same_path_as_stacked_floats(with_proprio):
    pixels = torch.randint(0, 256, (2, 2, 3, 56, 56), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    backbone = with_proprio.model.vision_backbone
    floats = backbone.normalize(pixels)
    assert floats.shape == (2, 12, 56, 56)
    assert torch.equal(floats[:, 6:9], backbone.featurizer.normalize(pixels[:, 1]))
    assert_close(backbone(pixels), backbone(floats).detach().numpy(), 1e-6)


@pytest.mark.parametrize(("name", "prefix"), [("without_proprio", "token_noproprio"), ("with_proprio", "token")])
def test_states_logits_and_actions(request, inputs, expected, name, prefix):
    policy: OpenVLAPolicy = request.getfixturevalue(name)
    embedded = embed_prefix(policy.model, inputs, policy.proprio_projector)
    ids, logits = policy.generate(inputs, lambda lg, _: greedy(lg))
    states = policy.decoder.states(policy.model, embedded, ids)
    assert_close(states, expected[f"{prefix}_hidden"], LOGIT_TOLERANCE)
    assert_close(logits, expected[f"{prefix}_action_logits"], LOGIT_TOLERANCE)
    assert torch.equal(policy.score(inputs, ids).logits, logits)
    actions = policy.unnormalize(policy.codec.decode(ids.numpy()))
    assert_close(actions, expected[f"{prefix}_actions"], 1e-6)


def test_regression_head(with_proprio, inputs, expected):
    actions = with_proprio.unnormalize(with_proprio.regress(inputs).detach().numpy())
    assert_close(actions, expected["l1_actions"], LOGIT_TOLERANCE)


def test_proprio_is_inferred_from_the_component_file(with_proprio):
    assert with_proprio.config.use_proprio
    assert with_proprio.chunk_length == 8


def test_batch_of_one_equals_its_row(with_proprio, inputs, expected):
    one = inputs.rows(slice(1, 2))
    _, logits = with_proprio.generate(one, lambda lg, _: greedy(lg))
    assert_close(logits, expected["token_action_logits"][1:], LOGIT_TOLERANCE)
