"""Demonstrations: determinism, bookkeeping, and actions that reproduce what they claim."""

import numpy as np
import pytest

from vlarl.data.demo_set import DemoSet
from vlarl.data.tabletop_demos import generate_demos
from vlarl.envs.tabletop.expert import IMPERFECT, PERFECT

SUITE = "tabletop_goal"


@pytest.fixture(scope="module")
def demos() -> DemoSet:
    return generate_demos([SUITE], episodes_per_task=3, seed=4, flaws=PERFECT, image_size=32)


def assert_equal(a: DemoSet, b: DemoSet) -> None:
    for name in ("images", "proprio", "actions", "instruction_ids", "episode_starts", "episode_lengths", "success"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.instructions == b.instructions


def test_the_arrays_fit_together(demos):
    assert demos.success.shape == (30,) and demos.success.all()
    assert len(demos) == demos.episode_lengths.sum() == len(demos.images) == len(demos.proprio)
    np.testing.assert_array_equal(demos.episode_starts, np.cumsum(demos.episode_lengths) - demos.episode_lengths)
    assert demos.images.shape[1:] == (1, 32, 32, 3)
    assert len(demos.instructions) == 10
    first = demos.instruction_ids[demos.episode_starts]
    np.testing.assert_array_equal(first, np.repeat(np.arange(10), 3))


def test_perfect_actions_lead_from_each_frame_to_the_next(demos):
    """Within an episode the gripper moves by five centimetres times the action."""
    inside = np.ones(len(demos), dtype=bool)
    inside[demos.episode_starts + demos.episode_lengths - 1] = False
    index = np.flatnonzero(inside)
    moved = demos.proprio[index + 1, :3] - demos.proprio[index, :3]
    np.testing.assert_allclose(moved, 0.05 * demos.actions[index, :3], atol=1e-5)


def test_chunks_follow_the_episode_and_then_stand_still(demos):
    start, length = int(demos.episode_starts[1]), int(demos.episode_lengths[1])
    chunk = demos.chunks(np.array([start, start + length - 2]), 4)
    np.testing.assert_array_equal(chunk[0], demos.actions[start : start + 4])
    np.testing.assert_array_equal(chunk[1, :2], demos.actions[start + length - 2 : start + length])
    gripper = demos.actions[start + length - 1, 6]
    np.testing.assert_array_equal(chunk[1, 2:], [[0, 0, 0, 0, 0, 0, gripper]] * 2)


def test_equal_seeds_give_equal_demonstrations_for_any_number_of_workers():
    wanted = {"episodes_per_task": 2, "seed": 9, "flaws": IMPERFECT, "image_size": 16}
    one = generate_demos(["tabletop_object"], **wanted)
    assert_equal(one, generate_demos(["tabletop_object"], **wanted, num_workers=2))
    other = generate_demos(["tabletop_object"], **{**wanted, "seed": 10})
    assert not np.array_equal(one.proprio[: len(other)], other.proprio[: len(one)])


def test_flawed_demonstrations_mix_success_and_failure():
    mixed = generate_demos([SUITE], episodes_per_task=20, seed=0, flaws=IMPERFECT, image_size=8)
    assert 0.25 <= mixed.success.mean() <= 0.55
    assert mixed.episode_lengths[~mixed.success].mean() < 32  # a failure is not recorded up to the time limit
