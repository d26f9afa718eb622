"""Our OpenVLA against arrays computed with the original implementation, in float32 from bfloat16 weights."""

import pytest
from comparisons import OPENVLA, OPENVLA_CHECKS, Arrays, load_openvla

from vlarl.policies.openvla.policy import OpenVLAPolicy


@pytest.fixture(scope="module")
def policy() -> OpenVLAPolicy:
    return load_openvla()


@pytest.mark.parametrize("check", OPENVLA_CHECKS)
def test_equals_the_original(policy, check):
    check(policy, Arrays(OPENVLA / "expected.npz"))


def test_every_golden_array_is_compared(policy):
    expected = Arrays(OPENVLA / "expected.npz")
    for check in OPENVLA_CHECKS:
        check(policy, expected)
    assert expected.read == set(expected)


def test_action_ids_come_from_the_config(policy):
    assert (policy.codec.first_id, policy.codec.first_id + policy.codec.num_bins - 1) == (31744, 31999)
