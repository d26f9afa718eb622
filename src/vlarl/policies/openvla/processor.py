"""Observations -> OpenVLAInputs: the prompt, the pixels at the model's size, the normalised robot state."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from vlarl.errors import UsageError
from vlarl.images.bicubic import bicubic_resize
from vlarl.images.crop import center_crop
from vlarl.images.jpeg import jpeg_round_trip
from vlarl.images.lanczos import lanczos_resize
from vlarl.policies.openvla.actions import Normalizer
from vlarl.policies.openvla.config import INSTRUCTION, OpenVLAConfig
from vlarl.policies.openvla.images import ImagePipeline, resize_strategy
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.types import Observation, UInt8Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_THREADS = 8  # threads contend for the interpreter lock, and simulators need cores too


class Processor:
    """Used by both engine and learner. Pixels stay uint8; the towers normalise them on the device."""

    def __init__(
        self,
        config: OpenVLAConfig,
        tokenizer: Tokenizer | None,
        normalizer: Normalizer,
        images: ImagePipeline = ImagePipeline(),  # noqa: B008 - frozen
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.normalizer = normalizer
        self.images = images
        self._strategy = resize_strategy(config.raw)
        # All towers use the same padded image; the original pads it with the last tower's mean.
        red, green, blue = (int(255 * mean) for mean in config.towers[-1].mean)
        self._letterbox_fill = (red, green, blue)
        self.prompt_ids = lru_cache(maxsize=4096)(self._prompt_ids)  # a suite has few instructions, each used often

    def __call__(self, observations: Sequence[Observation]) -> OpenVLAInputs:
        """A batch on the CPU."""
        if not observations:
            raise ValueError("an empty list of observations has no batch: give at least one")
        ids, mask = self.prompts([o.instruction for o in observations])
        pixels = self.frames([o.images for o in observations])
        proprio = None
        if self.config.use_proprio:
            stacked = np.stack([o.proprio for o in observations])
            if stacked.shape[1] != self.config.proprio_dim:
                raise ValueError(f"proprio has {stacked.shape[1]} values, this policy reads {self.config.proprio_dim}")
            proprio = torch.from_numpy(self.normalizer.normalize_proprio(stacked))
        return OpenVLAInputs(ids, mask, torch.from_numpy(pixels).permute(0, 1, 4, 2, 3).contiguous(), proprio)

    def prompts(self, instructions: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, P] the ids of the prompts, padded on the right, and a mask that leaves the padding out."""
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
        prompt = self.config.prompt_template.replace(INSTRUCTION, instruction.lower())
        ids: list[int] = self.tokenizer.encode(prompt).ids
        bos, suffix = self.config.bos_id, self.config.prompt_suffix_id
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if suffix is not None and ids[-1:] != [suffix]:
            ids = [*ids, suffix]
        rows = self.config.padded_vocab_size
        if not ids or max(*ids, self.config.pad_token_id) >= rows:
            raise UsageError(
                f"the tokenizer makes the ids {ids[:4]}… of a prompt, but the model has {rows} rows for them: the "
                "checkpoint's tokenizer.json or config.json is of another model, copy or download the folder again"
            )
        return tuple(ids)

    def frames(self, observed: Sequence[UInt8Array] | UInt8Array) -> UInt8Array:
        """[B, I, H, W, 3] at the model's size; images of another size take milliseconds each, divided over threads."""
        num_threads = min(len(observed), torch.get_num_threads(), MAX_THREADS)
        if num_threads == 1 or self.is_ready(observed[0]):
            return np.stack([self._pixels(images) for images in observed])
        with ThreadPoolExecutor(num_threads) as pool:
            return np.stack(list(pool.map(self._pixels, observed)))

    def is_ready(self, images: UInt8Array) -> bool:
        """Whether images [I, H, W, 3] are read as they are."""
        return self.images == ImagePipeline() and images.shape[1:3] == (self.config.image_size,) * 2

    def _pixels(self, images: UInt8Array) -> UInt8Array:
        """[I, H, W, 3] of any size -> the number of images and the size that the model reads."""
        wanted = self.config.num_images
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise ValueError(f"images must be uint8 [I, H, W, 3], got {images.dtype} {images.shape}")
        if images.shape[0] < wanted:
            raise ValueError(f"the observation has {images.shape[0]} images, this policy reads {wanted}")
        return np.stack([self._prepare(image) for image in images[:wanted]])

    def _prepare(self, image: UInt8Array) -> UInt8Array:
        """[H, W, 3] of any size -> the model's size, by the steps of the pipeline."""
        size = self.config.image_size
        if self.images.jpeg:
            image = jpeg_round_trip(image)
        if self.images.resize == "lanczos3":
            image = lanczos_resize(image, size)
        else:
            image = bicubic_resize(image, size, self._strategy, self._letterbox_fill)
        return center_crop(image) if self.images.center_crop else image


def preprocessor_config(config: OpenVLAConfig) -> dict[str, object]:
    """The content of preprocessor_config.json, for checkpoints that were not loaded with one."""
    size = config.image_size
    return {
        "processor_class": "PrismaticProcessor",
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": resize_strategy(config.raw),
        "use_fused_vision_backbone": len(config.towers) > 1,
        "input_sizes": [[3, size, size] for _ in config.towers],
        "interpolations": ["bicubic" for _ in config.towers],
        "means": [list(t.mean) for t in config.towers],
        "stds": [list(t.std) for t in config.towers],
    }
