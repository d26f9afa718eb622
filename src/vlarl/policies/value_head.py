"""The critic: a small network on a state of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class ValueHead(nn.Module):
    """MLP from the state before the first token to the values of a decision; computed in float32.

    Several values (of the steps or tokens of a chunk) are all computed from that one state, which is known before the
    first token is sampled, so each value is a valid baseline for every token.
    """

    def __init__(self, hidden_size: int, hidden_sizes: Sequence[int] = (1024, 512), num_values: int = 1) -> None:
        super().__init__()
        widths = [hidden_size, *hidden_sizes]
        self.hidden_sizes = tuple(hidden_sizes)
        self.num_values = num_values
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.out = nn.Linear(widths[-1], num_values)

    @property
    def reads(self) -> int:
        """Width of the state that it reads."""
        return int(next(iter(self.parameters())).shape[1])

    def reset(self, generator: torch.Generator) -> None:
        """Initialise from a generator; the last layer starts near zero so that early values don't harm the policy."""
        with torch.no_grad():
            for layer in [*self.layers, self.out]:
                assert isinstance(layer, nn.Linear)
                std = 0.01 if layer is self.out else (2.0 / layer.in_features) ** 0.5
                fresh = torch.randn(layer.weight.shape, generator=generator) * std
                layer.weight.copy_(fresh)
                layer.bias.zero_()

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """[B, H] -> [B, V] float32."""
        x = state.float()
        for layer in self.layers:
            x = F.gelu(layer(x))
        values: torch.Tensor = self.out(x)
        return values
