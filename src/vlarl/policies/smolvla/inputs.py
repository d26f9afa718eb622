"""What SmolVLA reads: an instruction, views and the robot's state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F

from vlarl.decisions import Decisions, TensorRows
from vlarl.policies.flow import ChainSample

TOKEN_STEP = 8


@dataclass(frozen=True)
class SmolVLAInputs(TensorRows):
    """A batch of observations. Instructions are padded on the right; pixels stay uint8, at the size that they came in,
    until the device."""

    tokens: torch.Tensor  # [B, T] int64
    token_mask: torch.Tensor  # [B, T] bool
    pixels: torch.Tensor  # [B, I, 3, H, W] uint8, or floats in 0..1
    state: torch.Tensor  # [B, S] float32, normalised and padded

    def rounded_up(self) -> Self:
        """The same rows, with instructions padded to a multiple of eight."""
        padding = -self.tokens.shape[1] % TOKEN_STEP
        return replace(self, tokens=F.pad(self.tokens, (0, padding)), token_mask=F.pad(self.token_mask, (0, padding)))


def smolvla_inputs(inputs: TensorRows) -> SmolVLAInputs:
    """The same inputs; what another policy reads is refused."""
    assert isinstance(inputs, SmolVLAInputs), "these are the inputs of another policy"
    return inputs


def chain_of(decisions: Decisions) -> ChainSample:
    """What was denoised; decisions of another policy are refused."""
    assert isinstance(decisions.sample, ChainSample), "these are decisions of another policy"
    return decisions.sample


def chain_decisions(sample: ChainSample, logprobs: torch.Tensor) -> Decisions:
    """Denoised chunks as decisions, with a log-prob [B, K*D] for each dimension of each executed action."""
    rows, steps, dimensions = sample.actions.shape
    step = torch.arange(steps, device=logprobs.device).repeat_interleave(dimensions)
    return Decisions(
        sample=sample,
        engine_logprobs=logprobs,
        mask=torch.ones(logprobs.shape, dtype=torch.bool, device=logprobs.device),
        step=step.expand(rows, -1),
        version=torch.zeros(rows, dtype=torch.int64, device=logprobs.device),
    )
