"""Statistics of demonstrations, in the layout of OpenVLA's dataset_statistics.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlarl.types import FloatArray

SWITCH_VALUES = (-1.0, 0.0, 1.0)  # commands of a gripper that only opens and closes


def dataset_statistics(
    actions: FloatArray, proprio: FloatArray, num_episodes: int, mask: Sequence[bool] | None = None
) -> dict[str, Any]:
    """Statistics of actions [N, D] and robot states [N, P], by which a policy normalises them.

    `mask`: the dimensions of an action that are normalised; by default as `action_mask` says.
    """
    return {
        "action": {**_columns(actions), "mask": action_mask(actions) if mask is None else list(mask)},
        "proprio": {**_columns(proprio), "mask": [True] * proprio.shape[1]},
        "num_transitions": len(actions),
        "num_trajectories": num_episodes,
    }


def action_mask(actions: FloatArray) -> list[bool]:
    """Which dimensions of an action are normalised: all but the last, the gripper, if it only opens and closes."""
    is_switch = bool(np.isin(actions[:, -1], SWITCH_VALUES).all())
    return [True] * (actions.shape[1] - 1) + [not is_switch]


def _columns(values: FloatArray) -> dict[str, Sequence[float]]:
    wide = values.astype(np.float64)
    low, high = wide.min(axis=0), wide.max(axis=0)
    q01, q99 = np.quantile(wide, 0.01, axis=0), np.quantile(wide, 0.99, axis=0)
    # A dimension that rarely moves, such as a rotation that one task in ten needs, may have equal quantiles: normalised
    # by them it could never move at all.
    still = q01 == q99
    return {
        "mean": wide.mean(axis=0).tolist(),
        "std": wide.std(axis=0).tolist(),
        "max": high.tolist(),
        "min": low.tolist(),
        "q01": np.where(still, low, q01).tolist(),
        "q99": np.where(still, high, q99).tolist(),
    }
