"""Our OpenVLA against arrays computed with the original implementation, in float32 from bfloat16 weights."""

from functools import partial

import pytest
from comparisons import OPENVLA, OPENVLA_CHECKS, Model, load_openvla
from fakes.golden_arrays import load_arrays, unnoticed

from vlarl.policies.checkpoint_json import read_json


@pytest.fixture(scope="module")
def model() -> Model:
    return load_openvla()


@pytest.mark.parametrize("check", OPENVLA_CHECKS)
def test_equals_the_original(model, check):
    check(model, load_arrays(OPENVLA / "expected.npz"))


def test_every_golden_array_is_compared(model):
    assert unnoticed(load_arrays(OPENVLA / "expected.npz"), [partial(check, model) for check in OPENVLA_CHECKS]) == []


def test_action_ids_come_from_the_config(model):
    """The last ones before the rows that pad the vocabulary."""
    raw, codec = read_json(OPENVLA / "config.json"), model.policy.codec
    end = raw["text_config"]["vocab_size"] - raw["pad_to_multiple_of"]
    assert (codec.first_id, codec.first_id + codec.num_bins) == (end - raw["n_action_bins"], end)
