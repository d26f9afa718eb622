"""Writes its arrays with timm, which vlarl neither needs nor installs.

    pip install timm==0.9.16
    python generate.py [FOLDER]     # beside this file unless a folder is named

Each file is one architecture of the published vision backbones at toy size, with random weights: its state under the
names that OpenVLA's checkpoints have, pixels, and the patches of the second-to-last block. Images of 36 pixels are not
a multiple of any patch, so that the border is cropped. Weights are small and biases large, so that the norms' epsilon
and each of the parts matters.
"""

import sys
from pathlib import Path

import numpy as np
import timm
import torch

SIZES = {"embed_dim": 16, "depth": 3, "num_heads": 2, "img_size": 36}
TOWERS = {
    "dinov2": ("vit_large_patch14_reg4_dinov2.lvd142m", None),
    "siglip_so400m": ("vit_so400m_patch14_siglip_384", None),
    "siglip_b16": ("vit_base_patch16_siglip_256", None),
    "clip_b": ("vit_base_patch16_clip_224.openai", "quick_gelu"),
    "clip_l": ("vit_large_patch14_clip_336.openai", "quick_gelu"),
    "in1k": ("vit_large_patch16_224.augreg_in21k_ft_in1k", None),
}


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Random values for every parameter, the same for the same architecture."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            std = 0.003 if name in ("patch_embed.proj.weight", "pos_embed", "cls_token") else 0.15
            parameter.copy_(centre + std * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def main(folder: Path) -> None:
    for name, (timm_id, activation) in TOWERS.items():
        generator = torch.Generator().manual_seed(0)
        model = timm.create_model(timm_id, pretrained=False, num_classes=0, act_layer=activation, **SIZES).eval()
        randomize(model, generator)
        pixels = torch.randn(2, 3, SIZES["img_size"], SIZES["img_size"], generator=generator)
        (features,) = model.get_intermediate_layers(pixels, n={len(model.blocks) - 2})
        state = {
            key.replace(".gamma", ".scale_factor"): value.numpy() for key, value in model.state_dict().items()
        }  # OpenVLA renames LayerScale's parameter
        arrays = {f"state/{key}": value for key, value in state.items()}
        arrays |= {"pixels": pixels.numpy(), "features": features.numpy(), "num_heads": np.array(SIZES["num_heads"])}
        np.savez_compressed(folder / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
