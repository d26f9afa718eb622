import numpy as np
import pytest

from vlarl.policies.openvla.actions import Normalizer, UniformActionCodec
from vlarl.policies.openvla.config import OpenVLAConfig, parse_config
from vlarl.policies.tiny import tiny_config


@pytest.fixture
def codec() -> UniformActionCodec:
    return UniformActionCodec(vocab_size=32000, num_bins=256, action_dim=1)


@pytest.mark.parametrize(
    ("action", "token"), [(-1.0, 31999), (0.0, 31872), (0.5, 31808), (1.0, 31744), (3.0, 31744), (-3.0, 31999)]
)
def test_known_tokens(codec, action, token):
    assert codec.encode(np.array([[action]])).tolist() == [token]


def test_the_two_lowest_ids_decode_alike_and_ids_fall_as_actions_rise(codec):
    ids = np.arange(31744, 32000)
    actions = codec.decode(ids[:, None])[:, 0, 0]
    assert actions[0] == actions[1] == pytest.approx(0.99607843)
    assert actions[-1] == pytest.approx(-0.99607843)
    assert (np.diff(actions[1:]) < 0).all()
    assert actions[31872 - 31744] == pytest.approx(0.0, abs=1e-7)


def test_decoding_inverts_encoding_within_half_a_bin():
    codec = UniformActionCodec(32000, 256, 7)
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 8, 7))
    ids = codec.encode(actions)
    assert ids.shape == (5, 56)
    assert ids.dtype == np.int64
    assert np.abs(codec.decode(ids) - actions).max() <= 1 / 255 + 1e-6
    np.testing.assert_array_equal(codec.encode(codec.decode(ids)), ids)


def test_ids_outside_the_support_and_bad_actions_are_refused(codec):
    with pytest.raises(ValueError, match=r"31744\.\.31999"):
        codec.decode(np.array([31743]))
    with pytest.raises(ValueError, match=r"31744\.\.31999"):
        codec.decode(np.array([32000]))
    with pytest.raises(ValueError, match="NaN"):
        codec.encode(np.array([[np.nan]]))
    with pytest.raises(ValueError, match="2 dimensions"):
        codec.encode(np.zeros((1, 2)))


def config_with(stats: dict, decoder: str = "autoregressive") -> OpenVLAConfig:
    raw = dict(tiny_config(decoder).raw)  # type: ignore[arg-type]
    return parse_config({**raw, "norm_stats": stats})


STATS = {
    "one": {"action": {"q01": [-2.0, 0.0], "q99": [4.0, 1.0], "mask": [True, False]}},
    "two": {"action": {"q01": [0.0, 0.0], "q99": [1.0, 1.0]}},
}


def test_unnormalise_known_values_and_leave_the_input_alone():
    normalizer = Normalizer(config_with(STATS), "one")
    actions = np.array([[-1.0, 0.3], [1.0, -0.7], [0.0, 0.0]])
    before = actions.copy()
    np.testing.assert_allclose(normalizer.unnormalize(actions), [[-2.0, 0.3], [4.0, -0.7], [1.0, 0.0]])
    np.testing.assert_array_equal(actions, before)
    np.testing.assert_allclose(normalizer.normalize(normalizer.unnormalize(actions)), actions, atol=1e-6)


def test_a_dimension_that_never_moves_is_in_the_middle():
    """As OpenVLA trains it; a gripper, which is not normalised, stays as it is."""
    still = {"action": {"q01": [0.5, 1.0], "q99": [0.5, 1.0], "mask": [True, False]}}
    normalizer = Normalizer(config_with({"still": still}), "still")
    np.testing.assert_array_equal(normalizer.normalize(np.array([[0.5, 1.0]])), [[0.0, 1.0]])
    np.testing.assert_array_equal(normalizer.unnormalize(np.array([[0.0, 1.0]])), [[0.5, 1.0]])


def test_oft_adds_to_the_range():
    one = Normalizer(config_with(STATS, "parallel"), "one").unnormalize(np.array([1.0, 0.0]))
    assert one[0] - 4.0 == pytest.approx(1e-8, rel=1e-3)


def test_key_is_chosen_when_single_and_otherwise_the_valid_ones_are_listed():
    assert Normalizer(config_with({"only": STATS["one"]})).resolve() == "only"
    with pytest.raises(ValueError, match="several statistics: one, two"):
        Normalizer(config_with(STATS)).resolve()
    with pytest.raises(ValueError, match="'three' is not in .*valid: one, two"):
        Normalizer(config_with(STATS), "three")


def test_proprio_goes_into_the_unit_range_and_is_clipped():
    config = tiny_config(proprio_low=[0.0] * 8, proprio_high=[2.0] * 8)
    values = Normalizer(config).normalize_proprio(np.array([0.0, 1.0, 2.0, 5.0, -5.0, 0.5, 1.5, 1.0]))
    np.testing.assert_allclose(values, [-1, 0, 1, 1, -1, -0.5, 0.5, 0], atol=1e-6)
