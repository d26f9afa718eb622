"""SmolVLM's vision tower (SigLIP) and the connector to its language model, with the checkpoint's parameter names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vlarl.policies.smolvla.config import TowerSizes


def padded_pixels(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """[B, 3, H, W] uint8, or floats in 0..1 -> [B, 3, size, size] in -1..1.

    The longer side is resized to `size`; black fills the top and the left, where the original puts it.
    """
    images = pixels.float() / 255.0 if pixels.dtype == torch.uint8 else pixels
    height, width = images.shape[-2:]
    if (height, width) != (size, size):
        ratio = max(width / size, height / size)
        resized = (int(height / ratio), int(width / ratio))
        images = F.interpolate(images, size=resized, mode="bilinear", align_corners=False)
        images = F.pad(images, (size - resized[1], 0, size - resized[0], 0))
    return images * 2.0 - 1.0


class Embeddings(nn.Module):
    """Patches with learned positions."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, sizes.hidden, sizes.patch, sizes.patch)
        self.side = sizes.image // sizes.patch
        self.shifted = sizes.shifted
        self.position_embedding = nn.Embedding(self.side**2, sizes.hidden)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> [B, N, hidden]."""
        patches: torch.Tensor = self.patch_embedding(pixels)
        return patches.flatten(2).transpose(1, 2) + self._positions()

    def _positions(self) -> torch.Tensor:
        """[N, hidden] of each patch, by its row and column."""
        table = self.position_embedding.weight
        if not self.shifted or table.dtype in (torch.bfloat16, torch.float16):
            return table
        along = (torch.arange(self.side, device=table.device) - 1).clamp_min(0)
        return table[(along[:, None] * self.side + along).flatten()]


class TowerAttention(nn.Module):
    """Attention of every patch to every patch."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(sizes.hidden, sizes.hidden) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, hidden] -> the same shape."""
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        seen = F.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.out_proj(seen.transpose(1, 2).flatten(2))
        return out


class TowerMlp(nn.Module):
    """Two layers with GELU's tanh approximation."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(sizes.hidden, sizes.inner), nn.Linear(sizes.inner, sizes.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, hidden] -> the same shape."""
        out: torch.Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return out


class TowerLayer(nn.Module):
    """A block with norms before attention and MLP."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.self_attn, self.mlp = TowerAttention(sizes), TowerMlp(sizes)
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(sizes.hidden, eps=sizes.eps) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, hidden] -> the same shape."""
        x = x + self.self_attn(self.layer_norm1(x))
        out: torch.Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class Encoder(nn.Module):
    """The tower's blocks."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TowerLayer(sizes) for _ in range(sizes.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, hidden] -> the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


class VisionTower(nn.Module):
    """Pixels -> features of the patches."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.embeddings, self.encoder = Embeddings(sizes), Encoder(sizes)
        self.post_layernorm = nn.LayerNorm(sizes.hidden, eps=sizes.eps)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] in -1..1 -> [B, N, hidden]."""
        out: torch.Tensor = self.post_layernorm(self.encoder(self.embeddings(pixels)))
        return out


class Projection(nn.Module):
    """The connector's only layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, hidden, bias=False)


class Connector(nn.Module):
    """Squares of patches side by side in one token of the language model's width."""

    def __init__(self, sizes: TowerSizes, hidden: int) -> None:
        super().__init__()
        self.merged = sizes.merged
        self.modality_projection = Projection(sizes.hidden * sizes.merged**2, hidden)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[B, N, width] -> [B, N / merged^2, hidden]."""
        side, s = round(features.shape[1] ** 0.5), self.merged
        squares = features.reshape(len(features), side // s, s, side // s, s, -1).transpose(2, 3)
        out: torch.Tensor = self.modality_projection.proj(squares.flatten(3).flatten(1, 2))
        return out
