"""Texts as `Decisions`: an element is a token, the stop token included, and a text is one environment step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

from vlarl.decisions import Decisions, TensorRows


@dataclass(frozen=True)
class TextSample(TensorRows):
    """Token ids of texts, the stop token included; 0 in the padding."""

    ids: torch.Tensor  # [B, L] int64
    length: torch.Tensor  # [B] int64 tokens of each text
    stopped: torch.Tensor  # [B] bool: it ended by itself; a text that was cut off has no stop token

    @property
    def lengths(self) -> torch.Tensor:
        """[B] the tokens of each text."""
        return self.length

    def attended(self) -> torch.Tensor:
        """[B, L] bool: what is not padding."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.length[:, None]

    def with_empty_rows(self, count: int) -> Self:
        """The same texts, and so many empty ones."""
        return self.map(lambda column: F.pad(column, (0, 0) * (column.ndim - 1) + (0, count))) if count else self

    def padded(self, column: torch.Tensor) -> torch.Tensor:
        """[B, L] a column of the first tokens, with zeros for the others."""
        return F.pad(column, (0, self.ids.shape[1] - column.shape[1]))


def text_decisions(sample: TextSample, logprobs: torch.Tensor) -> Decisions:
    """Decisions of texts with the log-probs [B, L] of their tokens. A text that was cut off has no stop token."""
    mask = sample.attended()
    return Decisions(
        sample=sample,
        engine_logprobs=torch.where(mask, logprobs, 0.0),
        mask=mask,
        step=torch.zeros_like(sample.ids),
        version=torch.zeros_like(sample.length),
    )


def text_sample(decisions: Decisions) -> TextSample:
    """The texts that were sampled; decisions of another policy are refused."""
    assert isinstance(decisions.sample, TextSample), "these are decisions of another policy"
    return decisions.sample
