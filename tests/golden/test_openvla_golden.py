"""Our OpenVLA against arrays computed with the original implementation, in float32 from bfloat16 weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vlarl.policies import distribution
from vlarl.policies.openvla.actions import Normalizer
from vlarl.policies.openvla.decoders import AutoregressiveDecoder, embed_prefix
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.types import PolicyInput

FOLDER = Path(__file__).parent / "openvla-tiny"
LOGIT_TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "expected.npz"))


@pytest.fixture(scope="module")
def policy() -> OpenVLAPolicy:
    return OpenVLAPolicy.load(FOLDER, unnorm_key="libero_spatial")


@pytest.fixture(scope="module")
def inputs(policy: OpenVLAPolicy, expected: dict[str, np.ndarray]) -> PolicyInput:
    pixels = np.stack([policy.processor._pixels(image[None]) for image in expected["images"]])
    ids = torch.from_numpy(expected["input_ids"])
    mask = torch.ones(ids.shape, dtype=torch.bool)
    return PolicyInput(ids, mask, torch.from_numpy(pixels).permute(0, 1, 4, 2, 3).contiguous(), None)


def assert_close(ours: torch.Tensor, theirs: np.ndarray, tolerance: float) -> None:
    assert tuple(ours.shape) == theirs.shape
    difference = np.abs(ours.detach().numpy().astype(np.float64) - theirs).max()
    assert difference <= tolerance, f"largest difference {difference}"


def test_pixels_are_resized_and_normalised_alike(policy, inputs, expected):
    assert_close(policy.model.vision_backbone.normalize(inputs.pixels), expected["pixel_values"], 1e-6)


def test_vision_features_and_projection(policy, inputs, expected):
    features = policy.model.vision_backbone(inputs.pixels)
    assert_close(features, expected["vision_features"], 5e-5)
    assert_close(policy.model.projector(features), expected["projected"], 5e-5)


def test_last_logits_over_the_full_vocabulary(policy, inputs, expected):
    state = policy.decoder.first_state(policy.model, embed_prefix(policy.model, inputs, None))
    logits = policy.model.full_logits(state)
    assert_close(logits, expected["logits_last"], LOGIT_TOLERANCE)


def test_greedy_generation_gives_the_same_tokens_and_logits(policy, inputs, expected):
    ids, logits = policy.generate(inputs, lambda lg, _: distribution.greedy(lg))
    assert ids.tolist() == expected["greedy_tokens"].tolist()
    assert_close(logits, expected["action_logits"], LOGIT_TOLERANCE)


def test_teacher_forced_scores_equal_the_originals(policy, inputs, expected):
    scores = policy.score(inputs, torch.from_numpy(expected["greedy_tokens"]))
    assert_close(scores.logits, expected["action_logits"], LOGIT_TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_logprobs_over_action_ids_and_full_vocabulary(policy, inputs, expected, temperature):
    tokens = torch.from_numpy(expected["greedy_tokens"])
    scores = policy.score(inputs, tokens)
    over_actions = distribution.token_logprobs(scores.logits, tokens - policy.codec.first_id, temperature)
    assert_close(over_actions, expected[f"logprob_action_T{temperature}"], LOGIT_TOLERANCE)
    states = AutoregressiveDecoder(7).states(policy.model, embed_prefix(policy.model, inputs, None), tokens)
    over_all = distribution.token_logprobs(policy.model.full_logits(states), tokens, temperature)
    assert_close(over_all, expected[f"logprob_fullvocab_T{temperature}"], LOGIT_TOLERANCE)


@pytest.mark.parametrize("key", ["libero_spatial", "bridge_orig"])
def test_unnormalised_actions(policy, expected, key):
    actions = policy.codec.decode(expected["greedy_tokens"])
    assert actions.shape == (3, 1, 7)
    np.testing.assert_allclose(
        Normalizer(policy.config).unnormalize(actions[:, 0], key), expected[f"actions_{key}"], atol=1e-7
    )
    np.testing.assert_allclose(policy.unnormalize(actions[:, 0], key), expected[f"actions_{key}"], atol=1e-7)


def test_action_ids_come_from_the_config(policy):
    assert (policy.codec.first_id, policy.codec.first_id + policy.codec.num_bins - 1) == (31744, 31999)
