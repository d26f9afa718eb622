"""Transforms of grippers and rotations, against conventions that are written out."""

import numpy as np
import pytest

from vlarl.data.rlds.transforms import absolute, binarise, clip, euler, invert


def column(*values: float) -> np.ndarray:
    return np.float32(values)[:, None]


def test_values_are_limited_and_exchanged():
    np.testing.assert_array_equal(clip(column(-1, 0.25, 2)), column(0, 0.25, 1))
    np.testing.assert_array_equal(invert(column(0, 0.25, 1)), column(1, 0.75, 0))


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ((1.0, 0.7, 0.4, 0.01, 0.0), (1, 0, 0, 0, 0)),  # on its way to closed
        ((0.0, 0.5, 0.96, 0.5, 0.02), (0, 1, 1, 0, 0)),
        ((1.0, 1.0, 0.6, 0.5), (1, 1, 0.5, 0.5)),  # the episode ends on the way: its last value
        ((0.95, 0.05, 1.0), (1, 1, 1)),  # the bounds themselves are on the way
    ],
)
def test_a_gripper_on_its_way_counts_as_where_it_arrives(recorded, expected):
    np.testing.assert_array_equal(binarise(column(*recorded)), column(*expected))


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ((0, 0, 1, 0, -1, 0), (1, 1, 0, 0, 1, 1)),  # open, closes, opens
        ((0, -1, 0, 1), (0, 1, 1, 0)),  # the first command opens, so it was closed
        ((0, 0, 0), (1, 1, 1)),  # no command: open
        ((0.05, -0.05, 0.2), (1, 1, 0)),  # small ones are none
    ],
)
def test_relative_commands_lead_to_states(commands, expected):
    np.testing.assert_array_equal(absolute(column(*commands)), column(*expected))


def about(axis: int, angle: float) -> np.ndarray:
    """The matrix of a rotation about a coordinate axis."""
    c, s = np.cos(angle), np.sin(angle)
    matrix = np.eye(3)
    i, j = [(1, 2), (2, 0), (0, 1)][axis]
    matrix[[i, j, i, j], [i, j, j, i]] = [c, c, -s, s]
    return matrix


def rotated(quaternion: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """v + 2 w (q x v) + 2 q x (q x v), for a unit quaternion x, y, z, w."""
    q, w = quaternion[:3], quaternion[3]
    twist = np.cross(q, vector)
    return vector + 2 * w * twist + 2 * np.cross(q, twist)


def test_angles_rotate_as_the_quaternion_does():
    rng = np.random.default_rng(0)
    quaternions = rng.normal(size=(200, 4))
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    h = np.sqrt(0.5)
    locked = [[0, h, 0, h], [0, -h, 0, h], [0.5, 0.5, -0.5, 0.5], [0.5, -0.5, 0.5, 0.5]]  # a pitch of 90 degrees
    for quaternion in [*quaternions, *np.array(locked)]:
        roll, pitch, yaw = euler(3 * quaternion[None].astype(np.float64))[0].astype(np.float64)
        matrix = about(2, yaw) @ about(1, pitch) @ about(0, roll)
        for vector in np.eye(3):
            np.testing.assert_allclose(matrix @ vector, rotated(quaternion, vector), atol=2e-5)
