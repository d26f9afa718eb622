"""Batches whose images are changed at random. What is random follows from the run's seed and the sample's index."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vlarl.config.finetune import AugmentConfig
from vlarl.images.augment import NUM_UNIFORMS, Strength, augment
from vlarl.training.sft import Batches, DemoBatch
from vlarl.types import FloatArray

BLOCK = 1024  # samples whose values are generated at once

_AUGMENTATION = 11  # keeps these seeds different from those of mixtures.py and rollout/tasks.py


class AugmentedBatches:
    """The same samples with changed images, on the device that the images are on."""

    def __init__(self, batches: Batches, config: AugmentConfig, seed: int) -> None:
        self._batches, self._seed = batches, seed
        self._strength = Strength(config.crop_area, config.brightness, config.contrast, config.saturation, config.hue)

    def batch(self, first: int, size: int) -> DemoBatch:
        """Samples `first` … `first + size - 1` of the run; each view of a sample is changed in its own way."""
        batch = self._batches.batch(first, size)
        frames = batch.frames  # [B, I, H, W, 3]
        uniforms = torch.from_numpy(sample_uniforms(self._seed, first, size, frames.shape[1]))
        changed = augment(frames.flatten(0, 1), uniforms.flatten(0, 1), self._strength)
        return replace(batch, frames=changed.view(frames.shape))


def sample_uniforms(seed: int, first: int, size: int, num_views: int) -> FloatArray:
    """[size, I, NUM_UNIFORMS] float32 in [0, 1): those of samples `first` … `first + size - 1`."""
    blocks = range(first // BLOCK, (first + size - 1) // BLOCK + 1)
    shape = BLOCK, num_views, NUM_UNIFORMS
    found = [
        np.random.default_rng(np.random.SeedSequence([seed, _AUGMENTATION, block])).random(shape, dtype=np.float32)
        for block in blocks
    ]
    start = first - blocks[0] * BLOCK
    return np.concatenate(found)[start : start + size]
