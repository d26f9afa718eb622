"""Conversion between recorded actions and a policy's actions, for the suites where they differ."""

from __future__ import annotations

import numpy as np

from vlarl.types import FloatArray


def policy_actions(name: str, recorded: FloatArray) -> FloatArray:
    """[N, D] recorded actions in the policy's convention.

    LIBERO's recordings hold the simulator's gripper command, -1 open and 1 closed; OpenVLA's policies use 1 for open
    and 0 for closed.
    """
    if not name.startswith("libero"):
        return recorded
    gripper = 1.0 - np.clip(recorded[:, -1:], 0.0, 1.0)
    converted: FloatArray = np.concatenate([recorded[:, :-1], gripper], axis=1).astype(np.float32)
    return converted


def recorded_actions(name: str, actions: FloatArray) -> FloatArray:
    """The inverse of `policy_actions`."""
    if not name.startswith("libero"):
        return actions
    gripper = 1.0 - 2.0 * actions[:, -1:]
    converted: FloatArray = np.concatenate([actions[:, :-1], gripper], axis=1).astype(np.float32)
    return converted
