"""The vision towers of the published Prismatic and OpenVLA checkpoints, in timm's terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["gelu", "quick_gelu"]

# The published layout's statistics are timm's, rounded to bfloat16 by the conversion that wrote them.
DINO_MEAN, DINO_STD = (0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375)
CLIP_MEAN, CLIP_STD = (0.482421875, 0.45703125, 0.408203125), (0.26953125, 0.26171875, 0.275390625)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class TowerConfig:
    """One vision transformer, in timm's terms."""

    timm_id: str
    image_size: int
    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    mlp_ratio: float = 4.0
    num_registers: int = 0
    class_token: bool = False
    class_position: bool = False  # the class token has a position of its own, before the patches'
    layer_scale: bool = False
    pre_norm: bool = False  # a norm before the blocks, and patches without bias
    attention_pool: bool = False
    activation: Activation = "gelu"
    norm_eps: float = 1e-6

    @property
    def num_patches(self) -> int:
        """Patches of one image; a border narrower than a patch is left out."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        """Rows of the position embedding."""
        return self.num_patches + self.class_position

    @property
    def mlp_dim(self) -> int:
        """Width of the blocks' MLPs, rounded down as timm does."""
        return int(self.embed_dim * self.mlp_ratio)


def _siglip(timm_id: str, image_size: int) -> TowerConfig:
    if "so400m" in timm_id:
        tower = TowerConfig(timm_id, image_size, 14, 1152, 27, 16, HALF, HALF, mlp_ratio=3.7362)
    else:
        tower = TowerConfig(timm_id, image_size, 16, 768, 12, 12, HALF, HALF)
    return replace(tower, attention_pool=True)


def _clip(timm_id: str, image_size: int) -> TowerConfig:
    if "large" in timm_id:
        tower = TowerConfig(timm_id, image_size, 14, 1024, 24, 16, CLIP_MEAN, CLIP_STD)
    else:
        tower = TowerConfig(timm_id, image_size, 16, 768, 12, 12, CLIP_MEAN, CLIP_STD)
    return replace(tower, class_token=True, class_position=True, pre_norm=True, norm_eps=1e-5)


DINOV2 = "vit_large_patch14_reg4_dinov2.lvd142m"
SIGLIP_224, SIGLIP_384 = "vit_so400m_patch14_siglip_224", "vit_so400m_patch14_siglip_384"
CLIP_336 = "vit_large_patch14_clip_336.openai"

# `image_sizes` and `timm_model_kwargs` of a config.json override their sizes.
KNOWN_TOWERS: dict[str, TowerConfig] = {
    tower.timm_id: tower
    for tower in (
        TowerConfig(
            DINOV2, 224, 14, 1024, 24, 16, DINO_MEAN, DINO_STD, num_registers=4, class_token=True, layer_scale=True
        ),
        _siglip(SIGLIP_224, 224),
        _siglip(SIGLIP_384, 384),
        _siglip("vit_base_patch16_siglip_224", 224),
        _siglip("vit_base_patch16_siglip_256", 256),
        _siglip("vit_base_patch16_siglip_384", 384),
        _clip("vit_base_patch16_clip_224.openai", 224),
        _clip("vit_large_patch14_clip_224.openai", 224),
        _clip(CLIP_336, 336),
        TowerConfig(
            "vit_large_patch16_224.augreg_in21k_ft_in1k",
            *(224, 16, 1024, 24, 16, HALF, HALF),
            class_token=True,
            class_position=True,
        ),
    )
}

# `vision_backbone_id` -> the towers of a checkpoint whose config.json does not list them, and their image size
VISION_BACKBONES: dict[str, tuple[tuple[str, ...], int]] = {
    "siglip-vit-b16-224px": (("vit_base_patch16_siglip_224",), 224),
    "siglip-vit-b16-256px": (("vit_base_patch16_siglip_256",), 256),
    "siglip-vit-b16-384px": (("vit_base_patch16_siglip_384",), 384),
    "siglip-vit-so400m": ((SIGLIP_224,), 224),
    "siglip-vit-so400m-384px": ((SIGLIP_384,), 384),
    "dinov2-vit-l": ((DINOV2,), 224),
    "clip-vit-b": (("vit_base_patch16_clip_224.openai",), 224),
    "clip-vit-l": (("vit_large_patch14_clip_224.openai",), 224),
    "clip-vit-l-336px": ((CLIP_336,), 336),
    "in1k-vit-l": (("vit_large_patch16_224.augreg_in21k_ft_in1k",), 224),
    "dinoclip-vit-l-336px": ((DINOV2, CLIP_336), 336),
    "dinosiglip-vit-so-224px": ((DINOV2, SIGLIP_224), 224),
    "dinosiglip-vit-so-384px": ((DINOV2, SIGLIP_384), 384),
}

# timm's constructor argument -> our field
TIMM_ARGUMENTS = {
    "embed_dim": "embed_dim",
    "depth": "depth",
    "num_heads": "num_heads",
    "mlp_ratio": "mlp_ratio",
    "patch_size": "patch_size",
    "reg_tokens": "num_registers",
}


def default_activation(timm_id: str) -> Activation:
    """The activation that the original code uses: OpenAI's CLIP was trained with the quick GELU, which timm lacks."""
    return "quick_gelu" if timm_id.endswith(".openai") else "gelu"
