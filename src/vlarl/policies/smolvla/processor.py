"""Observations -> SmolVLAInputs: the instruction's tokens, the views, the normalised state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from vlarl.errors import UsageError
from vlarl.policies.smolvla.config import SmolVLAConfig
from vlarl.policies.smolvla.inputs import SmolVLAInputs
from vlarl.policies.smolvla.statistics import Scalings
from vlarl.types import FloatArray, Observation, UInt8Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Processor:
    """Used by engine and learner alike."""

    def __init__(
        self,
        config: SmolVLAConfig,
        tokenizer: Tokenizer,
        pad_id: int,
        scalings: Scalings,
        num_images: int,
        state_dims: tuple[int, ...] | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.pad_id = pad_id
        self.scalings = scalings
        self.num_images = num_images
        self.state_dims = state_dims  # of the robot's state that the model reads; None: all, in their order
        self.tokens_of = lru_cache(maxsize=4096)(self._tokens_of)  # a suite has few instructions, each used often

    def __call__(self, observations: Sequence[Observation]) -> SmolVLAInputs:
        """A batch on the CPU."""
        if not observations:
            raise ValueError("an empty list of observations has no batch: give at least one")
        tokens, mask = self.instructions([o.instruction for o in observations])
        pixels = torch.from_numpy(self.frames([o.images for o in observations])).permute(0, 1, 4, 2, 3).contiguous()
        return SmolVLAInputs(tokens, mask, pixels, self.states(np.stack([o.proprio for o in observations])))

    def instructions(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T] tokens, padded on the right to the longest of them, and a mask that leaves the padding out."""
        rows = [self.tokens_of(text) for text in texts]
        width = max(len(row) for row in rows)
        tokens = torch.tensor([[*row, *[self.pad_id] * (width - len(row))] for row in rows])
        mask = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
        return tokens, mask

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        ids = self.tokenizer.encode(text if text.endswith("\n") else f"{text}\n").ids[: self.config.max_tokens]
        if not ids or max(*ids, self.pad_id) >= self.config.vocab_size:
            raise UsageError(
                f"the tokenizer makes the ids {ids[:4]}… of an instruction, but the model has {self.config.vocab_size} "
                "rows for them: the backbone's tokenizer is of another model, copy or download it again."
            )
        return tuple(ids)

    def frames(self, observed: Sequence[UInt8Array] | UInt8Array) -> UInt8Array:
        """[B, I, H, W, 3] the views that the model reads, at the size that they came in."""
        for images in observed:
            if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
                raise ValueError(f"images must be uint8 [I, H, W, 3], got {images.dtype} {images.shape}")
            if images.shape[0] < self.num_images:
                raise ValueError(f"the observation has {images.shape[0]} images, this policy reads {self.num_images}")
        return np.stack([images[: self.num_images] for images in observed])

    def states(self, proprio: FloatArray) -> torch.Tensor:
        """[B, max_state_dim] normalised and padded with zeros."""
        if self.state_dims is not None:
            if max(self.state_dims) >= proprio.shape[1]:
                raise ValueError(
                    f"policy.state_dims names dimension {max(self.state_dims)} of a state of {proprio.shape[1]} values"
                )
            proprio = proprio[:, self.state_dims]
        if proprio.shape[1] != self.config.state_dim:
            raise ValueError(
                f"the robot's state has {proprio.shape[1]} values, this policy reads {self.config.state_dim}: say "
                "which ones with policy.state_dims"
            )
        normalized = self.scalings.state.normalize(torch.from_numpy(np.ascontiguousarray(proprio)).float())
        return F.pad(normalized, (0, self.config.max_state_dim - self.config.state_dim))
