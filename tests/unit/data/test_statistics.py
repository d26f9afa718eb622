"""Statistics: known values, the gripper, and dimensions that rarely move."""

import numpy as np
import pytest

from vlarl.data.statistics import action_mask, dataset_statistics
from vlarl.policies.openvla.actions import Normalizer
from vlarl.policies.tiny import tiny_config


def test_known_values():
    actions = np.stack([np.arange(101.0), np.tile([0.0, 1.0], 51)[:101]], axis=1).astype(np.float32)
    proprio = np.full((101, 1), 3.0, np.float32)
    found = dataset_statistics(actions, proprio, num_episodes=4)
    action = found["action"]
    assert (action["q01"], action["q99"]) == ([1.0, 0.0], [99.0, 1.0])
    assert (action["min"], action["max"]) == ([0.0, 0.0], [100.0, 1.0])
    assert action["mean"] == pytest.approx([50.0, 50 / 101]) and action["std"][0] == pytest.approx(29.154759)
    assert action["mask"] == [True, False]
    assert found["proprio"]["q01"] == found["proprio"]["q99"] == [3.0] and found["proprio"]["mask"] == [True]
    assert found["num_transitions"] == 101 and found["num_trajectories"] == 4


@pytest.mark.parametrize(
    ("gripper", "normalised"),
    [([0, 1], False), ([-1, 1], False), ([1], False), ([0.2, 0.5], True), ([-1, 0.6], True)],
)
def test_a_gripper_that_only_opens_and_closes_is_not_normalised(gripper, normalised):
    actions = np.zeros((len(gripper), 3), np.float32)
    actions[:, 2] = gripper
    assert action_mask(actions) == [True, True, normalised]


def test_a_dimension_that_rarely_moves_can_still_move():
    """Two steps in a thousand turn the wrist: quantiles alone would hold it still for ever."""
    actions = np.zeros((1000, 2), np.float32)
    actions[[7, 9], 0] = 0.5, -0.25
    found = dataset_statistics(actions, np.zeros((1000, 1), np.float32), 1)
    config = tiny_config(action_dim=2, proprio_dim=1, norm_stats={"x": found})
    normalizer = Normalizer(config)
    np.testing.assert_allclose(normalizer.unnormalize(normalizer.normalize(actions)), actions, atol=1e-6)
