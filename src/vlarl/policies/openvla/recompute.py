"""Layers that are computed again in the backward pass, where memory for their activations is missing."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recomputed(layer: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A layer's output for x and other arguments; what it computes in between is computed again in the backward pass.

    Dropout must be the same both times. A recorded pass has none, and can't read the state of the random generators.
    """
    random = not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    return cast(torch.Tensor, checkpoint(layer, x, *args, use_reentrant=False, preserve_rng_state=random, **kwargs))
