"""Observations -> PolicyInput: the prompt, the pixels at the model's size, the normalised robot state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from vlarl.policies.openvla.actions import Normalizer
from vlarl.policies.openvla.config import OpenVLAConfig
from vlarl.types import Observation, PolicyInput, UInt8Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROMPT = "In: What action should the robot take to {instruction}?\nOut:"


class Processor:
    """The same function for engine and learner. Pixels stay uint8; the towers normalise them on the device."""

    def __init__(self, config: OpenVLAConfig, tokenizer: Tokenizer | None, normalizer: Normalizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.normalizer = normalizer
        self.prompt_ids = lru_cache(maxsize=4096)(self._prompt_ids)  # a suite has few instructions, each met often

    def __call__(self, observations: Sequence[Observation]) -> PolicyInput:
        """A batch on the CPU."""
        if not observations:
            raise ValueError("an empty list of observations has no batch: give at least one")
        ids, mask = self._prompts([o.instruction for o in observations])
        pixels = np.stack([self._pixels(o.images) for o in observations])
        proprio = None
        if self.config.use_proprio:
            stacked = np.stack([o.proprio for o in observations])
            if stacked.shape[1] != self.config.proprio_dim:
                raise ValueError(f"proprio has {stacked.shape[1]} numbers, this policy reads {self.config.proprio_dim}")
            proprio = torch.from_numpy(self.normalizer.normalize_proprio(stacked))
        return PolicyInput(ids, mask, torch.from_numpy(pixels).permute(0, 1, 4, 2, 3).contiguous(), proprio)

    def _prompts(self, instructions: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.prompt_ids(instruction) for instruction in instructions]
        width = max(len(row) for row in rows)
        ids = np.full((len(rows), width), self.config.pad_token_id, dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.bool_)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = True
        return torch.from_numpy(ids), torch.from_numpy(mask)

    def _prompt_ids(self, instruction: str) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise ValueError(
                "the checkpoint folder has no tokenizer.json, so prompts can't be encoded: copy the tokenizer of its "
                "base model into the folder"
            )
        ids: list[int] = self.tokenizer.encode(PROMPT.format(instruction=instruction.lower())).ids
        bos = int(self.config.text.get("bos_token_id", 1))
        if ids[:1] != [bos]:
            ids = [bos, *ids]
        suffix = self.config.prompt_suffix_id
        if suffix is not None and ids[-1] != suffix:
            ids = [*ids, suffix]
        return tuple(ids)

    def _pixels(self, images: UInt8Array) -> UInt8Array:
        """[I, H, W, 3] of any size -> the number of images and the size that the model reads."""
        wanted = self.config.num_images
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise ValueError(f"images must be uint8 [I, H, W, 3], got {images.dtype} {images.shape}")
        if images.shape[0] < wanted:
            raise ValueError(f"the observation has {images.shape[0]} images, this policy reads {wanted}")
        size = self.config.image_size
        images = images[:wanted]
        if images.shape[1:3] == (size, size):
            return images
        # The checkpoints' preprocessor resizes without keeping the aspect: bicubic with antialias, which PIL's is.
        resized = [Image.fromarray(i).resize((size, size), Image.Resampling.BICUBIC) for i in images]
        return np.stack([np.asarray(i) for i in resized])


def preprocessor_config(config: OpenVLAConfig) -> dict[str, object]:
    """The content of preprocessor_config.json, for checkpoints that were not loaded with one."""
    size = config.image_size
    return {
        "processor_class": "PrismaticProcessor",
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "use_fused_vision_backbone": len(config.towers) > 1,
        "input_sizes": [[3, size, size] for _ in config.towers],
        "interpolations": ["bicubic" for _ in config.towers],
        "means": [list(t.mean) for t in config.towers],
        "stds": [list(t.std) for t in config.towers],
    }
