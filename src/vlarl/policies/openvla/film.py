"""Converts OpenVLA-OFT's file of a vision backbone with FiLM to our parameter names.

Its trainer adds LoRA, wraps the backbone, and saves all of it as `vision_backbone--<step>_checkpoint.pt`:

    vision_backbone.featurizer.blocks.0.scale.weight                            FiLM's own, fully trained
    vision_backbone.featurizer.blocks.0.block.norm1.weight                      a block's, one level deeper
    vision_backbone.featurizer.blocks.0.block.attn.qkv.base_layer.weight        beside its adapter
    vision_backbone.featurizer.blocks.0.block.attn.qkv.lora_A.default.weight    lora_B likewise

and likewise for fused_featurizer. The patch convolution has an adapter, too: adapters are matched by the ends of names,
and its name ends in `proj` like that of a linear layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

LARGEST_ALPHA = 16  # the trainer's alpha is the rank, but no more than this
_ADAPTER = re.compile(r"(.+)\.lora_([AB])\.default\.weight")


def fold_film_state(state: Mapping[str, torch.Tensor], alpha: int | None = None) -> dict[str, torch.Tensor]:
    """The state of our vision backbone from such a file: adapters merged into their weights in float32, with our names.

    Without `alpha` it is the original trainer's alpha for the rank, which follows from the shapes. A state without
    adapters is only renamed.
    """
    adapters = {found[1]: name for name in state if (found := _ADAPTER.fullmatch(name)) and found[2] == "A"}
    folded = {}
    for name, tensor in state.items():
        if _ADAPTER.fullmatch(name):
            continue
        layer, _, kind = name.rpartition(".base_layer.")
        if kind == "weight" and layer in adapters:
            down, up = state[adapters[layer]], state[f"{layer}.lora_B.default.weight"]
            tensor = _folded(tensor, down, up, alpha)
        folded[_our_name(name)] = tensor
    return folded


def _folded(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, alpha: int | None) -> torch.Tensor:
    """weight [out, in] or [out, in, p, p] + scale * up @ down, in the weight's own type."""
    rank = down.shape[0]
    change = up.flatten(1).float() @ down.flatten(1).float()
    scale = (alpha or min(rank, LARGEST_ALPHA)) / rank
    return (weight.float() + scale * change.view(weight.shape)).to(weight.dtype)


def _our_name(name: str) -> str:
    inner = name.removeprefix("vision_backbone.").replace(".base_layer.", ".")
    return re.sub(r"(\.blocks\.\d+)\.block\.", r"\1.", inner)
