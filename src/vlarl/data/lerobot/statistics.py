"""Statistics of a LeRobot dataset: of each episode for meta/episodes, of all steps for meta/stats.json.

Quantiles are exact; lerobot estimates them from histograms. Of a camera, some pixels of some frames are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.types import IntArray, UInt8Array

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
SAMPLED_FRAMES = 32  # of an episode, evenly over its length
SAMPLED_SIDE = 128  # pixels of a frame in each direction, about

Statistics = dict[str, Any]
Histogram = NDArray[np.int64]  # [3, 256]


def value_statistics(values: NDArray[Any]) -> Statistics:
    """Statistics of values [N, …] over their steps; a scalar's are lists of one."""
    wide = values.reshape(len(values), -1) if values.ndim < 2 else values
    wide = wide.astype(np.float64)
    quantiles = np.quantile(wide, list(QUANTILES.values()), axis=0)
    return {
        "min": wide.min(axis=0).tolist(),
        "max": wide.max(axis=0).tolist(),
        "mean": wide.mean(axis=0).tolist(),
        "std": wide.std(axis=0).tolist(),
        "count": [len(wide)],
        **{name: row.tolist() for name, row in zip(QUANTILES, quantiles, strict=True)},
    }


def sampled_frames(length: int) -> IntArray:
    """The frames of an episode that are counted."""
    return np.unique(np.linspace(0, length - 1, min(length, SAMPLED_FRAMES)).round().astype(np.int64))


def frame_histogram(frames: UInt8Array) -> tuple[Histogram, int]:
    """How often each channel has each grey level in some of the frames [T, H, W, 3], and in how many frames."""
    chosen = sampled_frames(len(frames))
    stride = max(1, min(frames.shape[1:3]) // SAMPLED_SIDE)
    pixels = frames[chosen][:, ::stride, ::stride].reshape(-1, 3)
    return np.stack([np.bincount(pixels[:, channel], minlength=256) for channel in range(3)]), len(chosen)


def image_statistics(histogram: Histogram, num_frames: int) -> Statistics:
    """Statistics of a camera's channels, [3, 1, 1], of values in 0..1."""
    levels = np.arange(256) / 255
    counts = histogram.astype(np.float64)
    total = counts.sum(axis=1)
    mean = counts @ levels / total
    variance = (counts * (levels - mean[:, None]) ** 2).sum(axis=1) / total
    reached = np.cumsum(counts, axis=1) / total[:, None]
    columns = {
        "min": [levels[np.flatnonzero(row)[0]] for row in counts],
        "max": [levels[np.flatnonzero(row)[-1]] for row in counts],
        "mean": mean,
        "std": np.sqrt(variance),
        **{name: [levels[np.searchsorted(row, q)] for row in reached] for name, q in QUANTILES.items()},
    }
    shaped = {name: [[[float(value)]] for value in values] for name, values in columns.items()}
    return {**shaped, "count": [num_frames]}


class TotalStatistics:
    """Statistics of all episodes, collected one by one."""

    def __init__(self) -> None:
        self._values: dict[str, list[NDArray[Any]]] = {}
        self._histograms: dict[str, tuple[Histogram, int]] = {}

    def add(
        self, values: Mapping[str, NDArray[Any]], cameras: Mapping[str, tuple[Histogram, int]]
    ) -> dict[str, Statistics]:
        """Count an episode, with `frame_histogram` of its cameras, and return its own statistics."""
        episode = {}
        for name, array in values.items():
            self._values.setdefault(name, []).append(array)
            episode[name] = value_statistics(array)
        for name, (histogram, count) in cameras.items():
            before, frames_before = self._histograms.get(name, (np.zeros_like(histogram), 0))
            self._histograms[name] = (before + histogram, frames_before + count)
            episode[name] = image_statistics(histogram, count)
        return episode

    def total(self) -> dict[str, Statistics]:
        """The statistics of all episodes together."""
        joined = {name: value_statistics(np.concatenate(arrays)) for name, arrays in self._values.items()}
        cameras = {name: image_statistics(*one) for name, one in self._histograms.items()}
        return {**joined, **cameras}


def flat_columns(statistics: Mapping[str, Statistics]) -> dict[str, Sequence[Any]]:
    """An episode's statistics as columns of meta/episodes."""
    return {f"stats/{name}/{kind}": value for name, one in statistics.items() for kind, value in one.items()}
