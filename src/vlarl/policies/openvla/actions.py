"""Action tokens <-> actions: OpenVLA's uniform bins, and the statistics that scale actions to the robot's units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vlarl.policies.openvla.config import OpenVLAConfig
from vlarl.types import FloatArray, IntArray


class UniformActionCodec:
    """`num_bins` edges over [-1, 1] give `num_bins - 1` bins; a higher id is a smaller action.

    The id of an action is `vocab_size - digitize(action)`, so the two lowest ids decode to the same action.
    """

    def __init__(self, vocab_size: int, num_bins: int, action_dim: int) -> None:
        self.vocab_size = vocab_size
        self.num_bins = num_bins
        self.action_dim = action_dim
        self.first_id = vocab_size - num_bins
        self.edges = np.linspace(-1.0, 1.0, num_bins)
        self.centers = (self.edges[:-1] + self.edges[1:]) / 2.0

    def encode(self, actions: np.ndarray) -> IntArray:
        """[..., K, D] normalised actions -> [..., K*D] vocabulary ids; values outside [-1, 1] are clipped."""
        actions = np.asarray(actions)
        if actions.shape[-1] != self.action_dim:
            raise ValueError(f"actions have {actions.shape[-1]} dimensions, this policy's have {self.action_dim}")
        if not np.isfinite(actions).all():
            raise ValueError("actions contain NaN or infinity, which no token encodes: check the source of the actions")
        ids = self.vocab_size - np.digitize(np.clip(actions, -1.0, 1.0), self.edges)
        flat: IntArray = ids.reshape(*actions.shape[:-2], -1).astype(np.int64)
        return flat

    def decode(self, token_ids: np.ndarray) -> FloatArray:
        """[..., K*D] vocabulary ids -> [..., K, D] normalised actions."""
        ids = np.asarray(token_ids)
        if ids.size and not (self.first_id <= ids.min() and ids.max() < self.vocab_size):
            raise ValueError(
                f"token ids {ids.min()}..{ids.max()} exceed the action ids {self.first_id}..{self.vocab_size - 1}: "
                "sample with the action support only"
            )
        bins = np.clip(self.vocab_size - ids - 1, 0, len(self.centers) - 1)
        actions: FloatArray = self.centers[bins].reshape(*ids.shape[:-1], -1, self.action_dim).astype(np.float32)
        return actions


class Normalizer:
    """A checkpoint's statistics: they scale actions to the robot's units, and proprio to [-1, 1]."""

    def __init__(self, config: OpenVLAConfig, unnorm_key: str | None = None) -> None:
        self._stats, self._files = config.norm_stats, config.norm_stats_files
        # OFT's code adds an epsilon to the range, the original's does not; do as the code of the checkpoint does.
        self._range_eps = 1e-8 if config.decoder == "parallel" else 0.0
        self.unnorm_key = unnorm_key
        if unnorm_key is not None:
            self.resolve(unnorm_key)

    def resolve(self, unnorm_key: str | None = None) -> str:
        """The statistics to use: the key given, the policy's own, or the only one there is."""
        key = unnorm_key or self.unnorm_key
        valid = ", ".join(sorted(self._stats)) or "none: the checkpoint has no norm_stats"
        if key is None and len(self._stats) == 1:
            return next(iter(self._stats))
        if key is None:
            raise ValueError(f"unnorm_key is needed, since the checkpoint has several statistics: {valid}")
        if key not in self._stats:
            raise ValueError(f"unnorm_key {key!r} is not in the checkpoint's statistics; valid: {valid}")
        return key

    def unnormalize(self, actions: np.ndarray, unnorm_key: str | None = None) -> np.ndarray:
        """[..., D] in [-1, 1] -> the robot's units where the mask is set; float64, a new array."""
        low, high, mask = self._bounds("action", unnorm_key)
        actions = np.asarray(actions, dtype=np.float64)
        return np.where(mask, 0.5 * (actions + 1.0) * (high - low + self._range_eps) + low, actions)

    def normalize(self, actions: np.ndarray, unnorm_key: str | None = None) -> FloatArray:
        """The inverse of `unnormalize`, clipped to [-1, 1]; used to encode demonstrations."""
        return self._into_unit(np.asarray(actions), "action", unnorm_key)

    def normalize_proprio(self, proprio: np.ndarray, unnorm_key: str | None = None) -> FloatArray:
        """[..., P] robot state -> [-1, 1] by the 1% and 99% quantiles, clipped."""
        return self._into_unit(np.asarray(proprio), "proprio", unnorm_key)

    def _into_unit(self, values: np.ndarray, what: str, unnorm_key: str | None) -> FloatArray:
        low, high, mask = self._bounds(what, unnorm_key)
        scaled = np.where(mask, 2.0 * (values - low) / (high - low + 1e-8) - 1.0, values)
        if what == "action":  # a dimension that never moves: the middle, as the original trains it
            scaled = np.where(mask & (low == high), 0.0, scaled)
        return np.clip(scaled, -1.0, 1.0).astype(np.float32)

    def check(self, action_dim: int, proprio_dim: int | None) -> None:
        """Refuse unusable statistics: of the wrong length, not finite, or with q99 not larger than q01."""
        for what, size in (("action", action_dim), ("proprio", proprio_dim)):
            if size is not None:
                low, high, mask = self._bounds(what, None)
                for name, values in (("q01", low), ("q99", high), ("mask", mask)):
                    if values.shape != (size,):
                        raise self._refused(what, f"{name} has the shape {list(values.shape)} for {size} dimensions")
                self._check_values(what, low, high, mask)

    def _check_values(self, what: str, low: np.ndarray, high: np.ndarray, mask: np.ndarray) -> None:
        stats = self._stats[self.resolve()][what]
        for dimension in np.flatnonzero(mask).tolist():
            first, last = float(low[dimension]), float(high[dimension])
            where = f"in dimension {dimension}"
            if not (np.isfinite(first) and np.isfinite(last)):
                raise self._refused(what, f"q01 is {first} and q99 is {last} {where}")
            if last < first or (last == first and not _is_constant(stats, dimension)):
                raise self._refused(what, f"q99 ({last}) is not larger than q01 ({first}) {where}")

    def _refused(self, what: str, reason: str) -> ValueError:
        key = self.resolve()
        source = self._files.get(key, "the checkpoint")
        return ValueError(
            f"{source}: the {what} statistics {key!r} can't be used: {reason}. Copy the file again, or compute the "
            "statistics from the data that the policy was trained on"
        )

    def _bounds(self, what: str, unnorm_key: str | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        key = self.resolve(unnorm_key)
        entry: Any = self._stats[key]
        stats = entry.get(what) if isinstance(entry, Mapping) else None
        if not isinstance(stats, Mapping) or "q01" not in stats or "q99" not in stats:
            raise ValueError(f"statistics {key!r} of the checkpoint have no {what!r} entry with q01 and q99")
        try:
            low, high = np.asarray(stats["q01"], dtype=np.float64), np.asarray(stats["q99"], dtype=np.float64)
            mask = np.asarray(stats.get("mask", np.ones(low.shape, bool)))
            if mask.dtype.kind not in "biuf":
                raise ValueError(f"mask {mask.tolist()}")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"statistics {key!r} of the checkpoint: {what} contains a value that is not numeric ({error})"
            ) from error
        return low, high, mask.astype(np.bool_)


def _is_constant(stats: Mapping[str, Any], dimension: int) -> bool:
    """Whether a dimension is constant in the data, like the rotations in some of OpenVLA's datasets; it then decodes to
    that constant."""
    try:
        return bool(stats["min"][dimension] == stats["max"][dimension])
    except (KeyError, IndexError, TypeError):
        return False
