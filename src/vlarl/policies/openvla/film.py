"""The file in which OpenVLA-OFT keeps a vision backbone with FiLM, brought to our names.

Its trainer adds LoRA, wraps the backbone, and saves the whole of it as `vision_backbone--<step>_checkpoint.pt`:

    vision_backbone.featurizer.blocks.0.scale.weight                            FiLM's own, trained in full
    vision_backbone.featurizer.blocks.0.block.norm1.weight                      a block's, one level further in
    vision_backbone.featurizer.blocks.0.block.attn.qkv.base_layer.weight        beside its adapter
    vision_backbone.featurizer.blocks.0.block.attn.qkv.lora_A.default.weight    lora_B likewise

and so for fused_featurizer. The convolution of the patches has an adapter, too: the adapters go by the ends of names,
and its name ends in `proj` like that of a linear layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

LARGEST_ALPHA = 16  # the trainer's alpha is the rank, but no more than this
_ADAPTER = re.compile(r"(.+)\.lora_([AB])\.default\.weight")


def fold_film_state(state: Mapping[str, torch.Tensor], alpha: int | None = None) -> dict[str, torch.Tensor]:
    """The state of our vision backbone from such a file: adapters added to their weights in float32, names ours.

    Without `alpha` it is what the original trainer takes for the rank, which the shapes tell. A state without adapters
    is renamed only.
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
