"""Vision transformers with timm's parameter names, computing only what OpenVLA reads: the second-to-last block.

The last block, the final norm and SigLIP's attention pool exist so that a checkpoint keeps its layout; they are
never computed and take no gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vlarl.policies.openvla.config import TowerConfig

NORM_EPS = 1e-6  # timm's ViTs


class PatchEmbed(nn.Module):
    """Non-overlapping patches through one matrix; the parameter is a convolution's, as in timm."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.embed_dim, config.patch_size, config.patch_size)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[N, P, 3*p*p] normalised patches -> [N, P, W]."""
        # Kernel equals stride, so the convolution is a product; this is several times faster on a CPU.
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, T, W] -> [N, T, W]."""
        n, t, w = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.num_heads, w // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(n, t, w))
        return out


class Mlp(nn.Module):
    """Two layers with an exact GELU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., W] -> [..., W]."""
        out: torch.Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class LayerScale(nn.Module):
    """A learned factor for each channel; named as OpenVLA's checkpoints name it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + x * scale, in one pass."""
        return torch.addcmul(residual, x, self.scale_factor)


class PlainResidual(nn.Module):
    """What stands in for LayerScale in towers without it."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + x."""
        return residual + x


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=NORM_EPS)
        self.attn = Attention(config.embed_dim, config.num_heads)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=NORM_EPS)
        self.mlp = Mlp(config.embed_dim, config.mlp_dim)
        self.ls1 = LayerScale(config.embed_dim) if config.layer_scale else PlainResidual()
        self.ls2 = LayerScale(config.embed_dim) if config.layer_scale else PlainResidual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, T, W] -> [N, T, W]."""
        x = self.ls1(self.attn(self.norm1(x)), x)
        out: torch.Tensor = self.ls2(self.mlp(self.norm2(x)), x)
        return out


class AttentionPool(nn.Module):
    """Parameters of SigLIP's pooling head, which OpenVLA carries and never runs."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.latent = nn.Parameter(torch.zeros(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = Mlp(dim, config.mlp_dim)


class VisionTower(nn.Module):
    """One ViT, read at its second-to-last block."""

    pixel_std: torch.Tensor
    pixel_mean: torch.Tensor

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.embed_dim
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.num_registers, dim)) if config.num_registers else None
        self.pos_embed = nn.Parameter(torch.zeros(1, config.num_patches, dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn_pool = AttentionPool(config) if config.attention_pool else None
        # On the CPU even inside a `meta` context: these are constants, no checkpoint brings them.
        mean, std = (torch.tensor(c, device="cpu").view(3, 1, 1) for c in (config.mean, config.std))
        self.register_buffer("pixel_std", std, persistent=False)
        self.register_buffer("pixel_mean", mean, persistent=False)
        for unused in (self.blocks[-1], self.norm, self.attn_pool):
            if unused is not None:
                unused.requires_grad_(False)

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [..., 3, H, W] -> float32 with this tower's mean and deviation."""
        return (pixels.float() / 255.0 - self.pixel_mean) / self.pixel_std

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[N, P, 3, p, p] patches, uint8 or normalised -> [N, P, W]: second-to-last block, patch tokens, no norm."""
        if patches.dtype == torch.uint8:
            patches = self.normalize(patches)
        # Positions belong to the patches alone: no_embed_class in timm.
        x = self.patch_embed(patches.flatten(2).to(self.pos_embed.dtype)) + self.pos_embed
        prefix = [t.expand(x.shape[0], -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        if prefix:
            x = torch.cat([*prefix, x], dim=1)
        for block in self.blocks[:-1]:
            x = block(x)
        features: torch.Tensor = x[:, x.shape[1] - self.config.num_patches :]
        return features


class VisionBackbone(nn.Module):
    """DINOv2 and, where fused, SigLIP on the same pixels, their features side by side."""

    def __init__(self, towers: tuple[TowerConfig, ...]) -> None:
        super().__init__()
        self.featurizer = VisionTower(towers[0])
        self.fused_featurizer = VisionTower(towers[1]) if len(towers) > 1 else None
        self.patch_size = towers[0].patch_size
        self.num_patches = towers[0].num_patches
        self.feature_dim = sum(t.embed_dim for t in towers)

    def _towers(self) -> list[VisionTower]:
        return [self.featurizer] if self.fused_featurizer is None else [self.featurizer, self.fused_featurizer]

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [B, I, 3, H, W] -> [B, 3*towers*I, H, W], for each image the channels of each tower in turn."""
        return torch.cat([tower.normalize(pixels) for tower in self._towers()], dim=2).flatten(1, 2)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, I*P, W] features, image after image, DINOv2's channels first.

        Pixels are uint8 [B, I, 3, H, W], or floats [B, 3*towers*I, H, W] that `normalize` or the original
        preprocessor made.
        """
        towers = self._towers()
        b = pixels.shape[0]
        if pixels.dtype == torch.uint8:
            shared = self.patchify(pixels.flatten(0, 1))  # once for both towers, while a value is still a byte
            per_tower = [shared] * len(towers)
        else:
            stacked = pixels.view(-1, len(towers), 3, *pixels.shape[2:])
            per_tower = [self.patchify(stacked[:, i]) for i in range(len(towers))]
        features = torch.cat([tower(patches) for tower, patches in zip(towers, per_tower, strict=True)], dim=2)
        return features.reshape(b, -1, features.shape[2])

    def patchify(self, images: torch.Tensor) -> torch.Tensor:
        """[N, 3, H, W] -> [N, P, 3, p, p], row by row."""
        n, c, h, w = images.shape
        p = self.patch_size
        patches = images.reshape(n, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)
        return patches.reshape(n, -1, c, p, p)
