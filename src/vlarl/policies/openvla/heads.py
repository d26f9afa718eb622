"""Small networks around the model: the proprio token, OFT's regression head, a tied head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ProprioProjector(nn.Module):
    """Robot state to one token of the language model, with the names of OFT's component file."""

    def __init__(self, proprio_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, proprio: torch.Tensor) -> torch.Tensor:
        """[B, P] -> [B, H]."""
        out: torch.Tensor = self.fc2(F.gelu(self.fc1(proprio)))
        return out


class _ResidualBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.ffn(x)
        return out


class _ResidualMLP(nn.Module):
    def __init__(self, input_dim: int, hidden_size: int, output_dim: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(input_dim)
        self.fc1 = nn.Linear(input_dim, hidden_size)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(hidden_size) for _ in range(2))
        self.layer_norm2 = nn.LayerNorm(hidden_size)
        self.fc2 = nn.Linear(hidden_size, output_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        out: torch.Tensor = self.fc2(self.layer_norm2(x))
        return out


class L1ActionHead(nn.Module):
    """OFT's regression head: the D states of one action -> its D values, with the names of the component file."""

    def __init__(self, hidden_size: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = _ResidualMLP(hidden_size * action_dim, hidden_size, action_dim)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[B, K*D, H] states before the action tokens -> [B, K, D] normalised actions."""
        b, t, h = states.shape
        out: torch.Tensor = self.model(states.reshape(b, t // self.action_dim, self.action_dim * h))
        return out


class TiedHead(nn.Module):
    """A head tied to the embedding: it has no weight of its own, so checkpoints store none and they can't diverge."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.__dict__["embedding"] = embedding  # bypasses nn.Module, which would register it a second time

    @property
    def weight(self) -> torch.Tensor:
        """[V, H] the embedding's."""
        embedding: nn.Embedding = self.__dict__["embedding"]
        return embedding.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., V]."""
        return F.linear(states, self.weight)
