"""What OpenVLA reads: prompts, pixels and the robot's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F

from vlarl.decisions import TensorRows

PROMPT_STEP = 8


@dataclass(frozen=True)
class OpenVLAInputs(TensorRows):
    """A batch of observations. Prompts are padded on the right; pixels stay uint8 until the device."""

    input_ids: torch.Tensor  # [B, P] int64
    attention_mask: torch.Tensor  # [B, P] bool
    pixels: torch.Tensor  # [B, I, 3, H, W] uint8, at the model's resolution
    proprio: torch.Tensor | None  # [B, R] float32, normalised; None for policies without the proprio token
    known_ragged: bool | None = None  # the value of `ragged`, where it was found on the host already

    @property
    def ragged(self) -> bool:
        """Whether prompts differ in length. Found on the host, a device need not be waited for."""
        return not bool(self.attention_mask.all()) if self.known_ragged is None else self.known_ragged

    @property
    def lengths(self) -> torch.Tensor:
        """[B] the tokens of each prompt."""
        return self.attention_mask.sum(dim=1)

    @property
    def shape_key(self) -> tuple[int, ...]:
        """The sizes of all tensors, and whether rows are padded, which takes another path through the model."""
        return (*super().shape_key, int(self.ragged))

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device."""
        return replace(super().to(device), known_ragged=self.ragged)

    def rows(self, index: torch.Tensor | slice) -> Self:
        """The chosen rows, without prompt columns that none of them uses."""
        chosen = replace(super().rows(index), known_ragged=None)
        width = int(chosen.lengths.max()) if len(chosen) else chosen.input_ids.shape[1]
        return replace(chosen, input_ids=chosen.input_ids[:, :width], attention_mask=chosen.attention_mask[:, :width])

    def rounded_up(self) -> Self:
        """The same rows, with prompts padded to a multiple of eight if they are ragged already."""
        padding = -self.input_ids.shape[1] % PROMPT_STEP if self.ragged else 0
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, padding)),
            attention_mask=F.pad(self.attention_mask, (0, padding)),
            known_ragged=self.ragged,
        )

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in their order."""
        return replace(super().cat(parts), known_ragged=None)


def openvla_inputs(inputs: TensorRows) -> OpenVLAInputs:
    """The same inputs; what another policy reads is refused."""
    assert isinstance(inputs, OpenVLAInputs), "these are the inputs of another policy"
    return inputs
