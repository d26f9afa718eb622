"""Antialiased Lanczos3 resizing like TensorFlow's, as applied to OpenVLA's LIBERO frames."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from vlarl.types import FloatArray, IntArray, UInt8Array

LANCZOS_RADIUS = 3


def lanczos_resize(image: UInt8Array, size: int) -> UInt8Array:
    """Antialiased Lanczos3 resizing to a square like TensorFlow's resize: rounded once, at the end."""
    shrunk = _resampled(image.astype(np.float32), size).transpose(1, 0, 2)
    return _to_uint8(_resampled(shrunk, size).transpose(1, 0, 2))


def _to_uint8(values: np.ndarray) -> UInt8Array:
    rounded: UInt8Array = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return rounded


def _resampled(image: FloatArray, size: int) -> FloatArray:
    """[H, W, C] -> [size, W, C]. No matrix product: its threads would compete with those that resize other images."""
    lines = np.ascontiguousarray(image).reshape(len(image), -1)
    sums = np.zeros((size, lines.shape[1]), np.float32)
    near = np.empty_like(sums)
    for indices, weights in zip(*_lanczos_taps(len(image), size), strict=True):
        np.take(lines, indices, axis=0, out=near, mode="clip")
        near *= weights[:, None]
        sums += near
    return sums.reshape(size, *image.shape[1:])


@lru_cache(maxsize=64)
def _lanczos_taps(source: int, target: int) -> tuple[IntArray, FloatArray]:
    """[taps, target] the source lines of each new line, and their weights, which sum to 1.

    Shrinking widens the kernel, which is the antialiasing. Lines beyond the edge have weight 0.
    """
    step = source / target
    scale = max(step, 1.0)
    centers = (np.arange(target) + 0.5) * step
    first = np.floor(centers - LANCZOS_RADIUS * scale).astype(np.int64)
    lines = first + np.arange(int(2 * LANCZOS_RADIUS * scale) + 2)[:, None]
    distance = (lines + 0.5 - centers) / scale
    counts = (np.abs(distance) < LANCZOS_RADIUS) & (lines >= 0) & (lines < source)
    kernel = np.sinc(distance) * np.sinc(distance / LANCZOS_RADIUS) * counts
    return lines, (kernel / kernel.sum(axis=0)).astype(np.float32)
