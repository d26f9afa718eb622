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


def pooled_statistics(
    actions: Sequence[FloatArray], proprio: Sequence[FloatArray], weights: Sequence[float]
) -> dict[str, Any]:
    """Statistics of several datasets as one, each with its weight, for policies that normalise all of them alike."""
    frames = np.concatenate([np.full(len(part), w / len(part)) for part, w in zip(actions, weights, strict=True)])
    return {
        "action": _columns(np.concatenate(actions), frames / frames.sum()),
        "proprio": _columns(np.concatenate(proprio), frames / frames.sum()),
    }


def _columns(values: FloatArray, weights: FloatArray | None = None) -> dict[str, Sequence[float]]:
    """Of each column; `weights` of the rows sum to 1, and by default all are equal."""
    wide = values.astype(np.float64)
    low, high = wide.min(axis=0), wide.max(axis=0)
    if weights is None:
        mean, std = wide.mean(axis=0), wide.std(axis=0)
        q01, q99 = np.quantile(wide, 0.01, axis=0), np.quantile(wide, 0.99, axis=0)
    else:
        mean = weights @ wide
        std = np.sqrt(weights @ (wide - mean) ** 2)
        q01, q99 = np.quantile(wide, [0.01, 0.99], axis=0, weights=weights, method="inverted_cdf")
    # A dimension that rarely moves, such as a rotation that one task in ten needs, may have equal quantiles: normalised
    # by them it could never move at all.
    still = q01 == q99
    return {
        "mean": mean.tolist(),
        "std": std.tolist(),
        "max": high.tolist(),
        "min": low.tolist(),
        "q01": np.where(still, low, q01).tolist(),
        "q99": np.where(still, high, q99).tolist(),
    }
