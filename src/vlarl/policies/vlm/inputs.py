"""What a language model reads: token ids, and pixels of images and videos, of which rows have different amounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from vlarl.decisions import TensorRows

VISION = (  # fields that hold pixels or describe them, under the names that processors and models use
    *("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes"),
    *("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
)
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # fields with one value a token


@dataclass(frozen=True)
class Ragged(TensorRows):
    """Rows of different lengths, end to end: a batch takes the memory of its rows, however long the longest is.

    >>> ragged = Ragged(torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))
    >>> ragged.padded().tolist()
    [[1, 2], [0, 0], [3, 0]]
    """

    values: torch.Tensor  # [sum of counts, …] the entries of all rows
    counts: torch.Tensor  # [B] int64 entries of each row

    def __len__(self) -> int:
        return len(self.counts)

    def rows(self, index: torch.Tensor | slice) -> Self:
        """The chosen rows; those of a slice are not copied."""
        counts, total = self.counts[index], int(self.counts[index].sum())
        if isinstance(index, slice) and index.step in (None, 1):
            first = int(self.counts[: index.indices(len(self))[0]].sum())
            return replace(self, values=self.values[first : first + total], counts=counts)
        begins = (self.counts.cumsum(dim=0) - self.counts)[index]  # of each chosen row, here
        moved = begins - (counts.cumsum(dim=0) - counts)  # from where it begins among the chosen ones
        entries = torch.arange(total, device=counts.device) + moved.repeat_interleave(counts)
        return replace(self, values=self.values[entries], counts=counts)

    @property
    def shape_key(self) -> tuple[int, ...]:
        """Also how many entries each row has: the same entries in other rows are another pass."""
        return (*super().shape_key, *self.counts.tolist())

    def padded(self) -> torch.Tensor:
        """[B, largest count, …] a row for each member, with zeros after its entries."""
        width = int(self.counts.max()) if len(self) else 0
        found = self.values.new_zeros((len(self), width, *self.values.shape[1:]))
        found[torch.arange(width, device=self.counts.device) < self.counts[:, None]] = self.values
        return found

    def empty_rows(self, count: int) -> Self:
        """As many rows of the same kind, all of them without entries."""
        return replace(self, values=self.values[:0].clone(), counts=self.counts.new_zeros(count))


@dataclass(frozen=True)
class VlmInputs(TensorRows):
    """A batch of prompts. They are padded on the right here, so that batches can be joined; `Prefix` is what the model
    reads."""

    ids: torch.Tensor  # [B, P] int64
    attention_mask: torch.Tensor  # [B, P] bool
    mm_token_type_ids: torch.Tensor | None = None  # [B, P] int64: which tokens are of an image or a video
    token_type_ids: torch.Tensor | None = None  # [B, P] int64: the same in other families
    pixel_values: Ragged | None = None  # None: no row has images
    pixel_attention_mask: Ragged | None = None
    image_grid_thw: Ragged | None = None
    image_sizes: Ragged | None = None
    pixel_values_videos: Ragged | None = None
    video_grid_thw: Ragged | None = None
    second_per_grid_ts: Ragged | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """[B] the tokens of each prompt."""
        return self.attention_mask.sum(dim=1)

    def rows(self, index: torch.Tensor | slice) -> Self:
        """The chosen rows, without prompt columns that none of them uses."""
        chosen = super().rows(index)
        width = int(chosen.lengths.max()) if len(chosen) else 0
        narrow = {
            name: column[:, :width]
            for name in ("ids", "attention_mask", *TOKEN_TYPES)
            if (column := getattr(chosen, name)) is not None
        }
        return replace(chosen, **narrow)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in their order; rows of parts without images have none."""
        filled = list(parts)
        for name in VISION:
            known = next((getattr(part, name) for part in parts if getattr(part, name) is not None), None)
            if known is not None:
                filled = [
                    part if getattr(part, name) is not None else replace(part, **{name: known.empty_rows(len(part))})
                    for part in filled
                ]
        return super().cat(filled)

    def left_padded(self, column: torch.Tensor) -> torch.Tensor:
        """[B, P] the same values with the padding on the left: every prompt then ends in the last column."""
        width = column.shape[1]
        source = torch.arange(width, device=column.device) - (width - self.lengths)[:, None]
        return torch.where(source >= 0, column.gather(1, source.clamp(min=0)), torch.zeros_like(column))


def vlm_inputs(inputs: TensorRows) -> VlmInputs:
    """The same inputs; what another policy reads is refused."""
    assert isinstance(inputs, VlmInputs), "these are the inputs of another policy"
    return inputs
