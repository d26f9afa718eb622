"""Weights that are known and not read yet: of each a rank reads its own part, once it knows which one that is.

    load_model(…, deferred=True) ─► placeholders ─► adapters, heads, critic ─► sharded ─► each rank reads its rows

A placeholder has the shape, the type and the device of its weight and the memory of a single value, so that a policy is
prepared for training as if it had been read. Nothing may compute with it. `training/fsdp.py` replaces placeholders by
the parts that this process keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

STORED = "vlarl_stored"  # the attribute of a placeholder that names its weight


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of a safetensors file, and the type that it is to have in memory."""

    path: Path
    name: str
    dtype: torch.dtype

    def rows(self, first: int, count: int) -> torch.Tensor:
        """So many rows of the tensor, in memory of their own; no others are read."""
        try:
            with safe_open(self.path, framework="pt", device="cpu") as file:
                part: torch.Tensor = file.get_slice(self.name)[first : first + count]
                return part.to(self.dtype, copy=True)
        except SafetensorError as error:
            raise ValueError(f"{self.path} is truncated or corrupt ({error}): copy or download it again") from error


def placeholder(stored: StoredWeight, shape: tuple[int, ...], requires_grad: bool) -> nn.Parameter:
    """A parameter on the host that stands for a stored weight."""
    made = nn.Parameter(torch.zeros((), dtype=stored.dtype).expand(shape), requires_grad)
    setattr(made, STORED, stored)
    return made


def stored_weight(parameter: torch.Tensor | None) -> StoredWeight | None:
    """What a placeholder stands for; None for any other tensor."""
    found: StoredWeight | None = getattr(parameter, STORED, None)
    return found


def copied(parameter: nn.Parameter) -> nn.Parameter:
    """Another placeholder for the same weight: a deep copy would allocate all of it."""
    stored = stored_weight(parameter)
    assert stored is not None
    return placeholder(stored, tuple(parameter.shape), parameter.requires_grad)
