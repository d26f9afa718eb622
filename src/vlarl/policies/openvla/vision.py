"""Vision transformers with timm's parameter names, computing only what OpenVLA reads: the second-to-last block.

The last block, the final norm and SigLIP's attention pool exist so that a checkpoint keeps its layout; they are
never computed and take no gradient.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from vlarl.policies.openvla.recompute import recomputed
from vlarl.policies.openvla.towers import Activation, TowerConfig


class PatchEmbed(nn.Module):
    """Non-overlapping patches through one matrix; the parameter is a convolution's, as in timm."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.embed_dim, config.patch_size, config.patch_size, bias=not config.pre_norm)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[N, P, 3, p, p] normalised patches -> [N, P, W]."""
        if type(self.proj) is nn.Conv2d:
            # Kernel equals stride, so the convolution is a product; this is several times faster on a CPU.
            return F.linear(patches.flatten(2), self.proj.weight.flatten(1), self.proj.bias)
        # An adapter wraps it, as in the original code: only its own forward is correct.
        wrapped: torch.Tensor = self.proj(patches.flatten(0, 1))
        return wrapped.view(*patches.shape[:2], -1)


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
    """Two layers with an exact GELU, or the sigmoid approximation that OpenAI's CLIP was trained with."""

    def __init__(self, dim: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., W] -> [..., W]."""
        x = self.fc1(x)
        x = F.gelu(x) if self.activation == "gelu" else x * torch.sigmoid(1.702 * x)
        out: torch.Tensor = self.fc2(x)
        return out


class LayerScale(nn.Module):
    """A learned factor for each channel, with the name that it has in OpenVLA's checkpoints."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + x * scale, in one pass."""
        return torch.addcmul(residual, x, self.scale_factor)


class PlainResidual(nn.Module):
    """Replaces LayerScale in towers without it."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + x."""
        return residual + x


class Block(nn.Module):
    """One pre-norm transformer block; with FiLM, a prompt scales and shifts each channel after the attention, equally
    over the whole image (Perez et al., 2018)."""

    def __init__(self, config: TowerConfig, film_dim: int | None = None) -> None:
        super().__init__()
        self.recompute = False  # in the backward pass instead of saving activations
        dim = config.embed_dim
        self.norm1 = nn.LayerNorm(dim, eps=config.norm_eps)
        self.attn = Attention(dim, config.num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=config.norm_eps)
        self.mlp = Mlp(dim, config.mlp_dim, config.activation)
        self.ls1 = LayerScale(dim) if config.layer_scale else PlainResidual()
        self.ls2 = LayerScale(dim) if config.layer_scale else PlainResidual()
        self.scale = nn.Linear(film_dim, dim) if film_dim else None
        self.shift = nn.Linear(film_dim, dim) if film_dim else None

    @property
    def last_product(self) -> Any:
        """The linear layer whose output nothing but a sum reads."""
        return self.mlp.fc2

    def forward(self, x: torch.Tensor, language: torch.Tensor | None) -> torch.Tensor:
        """[N, T, W] -> [N, T, W]; with FiLM, language [N, H] is the mean embedding of each image's prompt."""
        x = self.ls1(self.attn(self.norm1(x)), x)
        if self.scale is not None and self.shift is not None:
            x = torch.addcmul(self.shift(language).unsqueeze(1), x, 1 + self.scale(language).unsqueeze(1))
        out: torch.Tensor = self.ls2(self.mlp(self.norm2(x)), x)
        return out


class AttentionPool(nn.Module):
    """Parameters of SigLIP's pooling head, which OpenVLA contains but never runs."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.latent = nn.Parameter(torch.zeros(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.mlp = Mlp(dim, config.mlp_dim, "gelu")


class VisionTower(nn.Module):
    """One ViT, read at its second-to-last block."""

    pixel_std: torch.Tensor
    pixel_mean: torch.Tensor

    def __init__(self, config: TowerConfig, film_dim: int | None = None) -> None:
        super().__init__()
        self.config = config
        dim = config.embed_dim
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.num_registers, dim)) if config.num_registers else None
        self.pos_embed = nn.Parameter(torch.zeros(1, config.num_positions, dim))
        self.norm_pre = nn.LayerNorm(dim, eps=config.norm_eps) if config.pre_norm else None
        self.blocks = nn.ModuleList(Block(config, film_dim) for _ in range(config.depth))
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.attn_pool = AttentionPool(config) if config.attention_pool else None
        # On the CPU even inside a `meta` context: these are constants that no checkpoint contains.
        mean, std = (torch.tensor(c, device="cpu").view(3, 1, 1) for c in (config.mean, config.std))
        self.register_buffer("pixel_std", std, persistent=False)
        self.register_buffer("pixel_mean", mean, persistent=False)
        for unused in self.unused:
            unused.requires_grad_(False)

    @property
    def unused(self) -> list[nn.Module]:
        """What comes after the second-to-last block: the checkpoint has it, and no pass reads it."""
        return [m for m in (self.blocks[-1], self.norm, self.attn_pool) if m is not None]

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [..., 3, H, W] -> float32 with this tower's mean and std."""
        return (pixels.float() / 255.0 - self.pixel_mean) / self.pixel_std

    def forward(self, patches: torch.Tensor, language: torch.Tensor | None = None) -> torch.Tensor:
        """[N, P, 3, p, p] patches, uint8 or normalised -> [N, P, W]: second-to-last block, patch tokens, no norm."""
        if patches.dtype == torch.uint8:
            patches = self.normalize(patches)
        x = self._embed(patches.to(self.pos_embed.dtype))
        for block in self.blocks[:-1]:
            x = recomputed(block, x, language) if block.recompute and block.training else block(x, language)
        features: torch.Tensor = x[:, x.shape[1] - self.config.num_patches :]
        return features

    def _embed(self, patches: torch.Tensor) -> torch.Tensor:
        """The input of the first block: class token, registers, patches."""
        x = self.patch_embed(patches)
        if not self.config.class_position:  # no_embed_class in timm
            x = x + self.pos_embed
        prefix = [t.expand(x.shape[0], -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        if prefix:
            x = torch.cat([*prefix, x], dim=1)
        if self.config.class_position:
            x = x + self.pos_embed
        return x if self.norm_pre is None else cast(torch.Tensor, self.norm_pre(x))


class VisionBackbone(nn.Module):
    """One tower, or two on the same pixels with their features concatenated; with FiLM, they also read the prompt."""

    def __init__(self, towers: tuple[TowerConfig, ...], film_dim: int | None = None) -> None:
        super().__init__()
        self.featurizer = VisionTower(towers[0], film_dim)
        self.fused_featurizer = VisionTower(towers[1], film_dim) if len(towers) > 1 else None
        self.patch_size = towers[0].patch_size
        self.num_patches = towers[0].num_patches
        self.feature_dim = sum(t.embed_dim for t in towers)
        self.use_film = film_dim is not None

    @property
    def towers(self) -> list[VisionTower]:
        """The one tower, or both."""
        return [self.featurizer] if self.fused_featurizer is None else [self.featurizer, self.fused_featurizer]

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [B, I, 3, H, W] -> [B, 3*towers*I, H, W], for each image the channels of each tower in turn."""
        return torch.cat([tower.normalize(pixels) for tower in self.towers], dim=2).flatten(1, 2)

    def forward(self, pixels: torch.Tensor, language: torch.Tensor | None = None) -> torch.Tensor:
        """[B, I*P, W] features, image after image, the first tower's channels first.

        Pixels are uint8 [B, I, 3, H, W], or floats [B, 3*towers*I, H, W] that `normalize` or the original
        preprocessor made. With FiLM, language [B, H] is the mean embedding of each prompt.
        """
        towers = self.towers
        b = pixels.shape[0]
        if pixels.dtype == torch.uint8:
            shared = self.patchify(pixels.flatten(0, 1))  # once for both towers, while a value is still a byte
            per_tower = [shared] * len(towers)
        else:
            stacked = pixels.view(-1, len(towers), 3, *pixels.shape[2:])
            per_tower = [self.patchify(stacked[:, i]) for i in range(len(towers))]
        if self.use_film and language is None:
            raise ValueError("the vision backbone has FiLM, so it needs the mean embedding of each prompt (language)")
        if language is not None:
            language = language.repeat_interleave(per_tower[0].shape[0] // b, dim=0)  # [B*I, H]
        features = torch.cat([t(patches, language) for t, patches in zip(towers, per_tower, strict=True)], dim=2)
        return features.reshape(b, -1, features.shape[2])

    def patchify(self, images: torch.Tensor) -> torch.Tensor:
        """[N, 3, H, W] -> [N, P, 3, p, p], row by row; like a convolution, without a border narrower than a patch."""
        n, c, h, w = images.shape
        p = self.patch_size
        whole = images[..., : h // p * p, : w // p * p]
        patches = whole.reshape(n, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)
        return patches.reshape(n, -1, c, p, p)
