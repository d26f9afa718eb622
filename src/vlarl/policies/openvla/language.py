"""Running a transformers decoder layer by layer, with masks and positions that we choose.

The loop over the layers is ours because the decoders need what the library's own forward hides: bidirectional
attention, positions that skip padding in the middle, states before the final norm. The layers, their parameters and
their hooks (gradient checkpointing, LoRA, FSDP) stay the library's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from vlarl.policies.openvla.llama import LlamaLayer, use_fast_layers


def build_language_model(text: Mapping[str, Any]) -> nn.Module:
    """A transformers causal language model with random weights from the `text_config` of a checkpoint."""
    arguments = {k: v for k, v in text.items() if k not in ("model_type", "torch_dtype", "dtype")}
    config = AutoConfig.for_model(text["model_type"], **arguments)
    config.use_cache = False
    build = cast(Any, AutoModelForCausalLM).from_config  # untyped in the library
    language_model = cast(nn.Module, build(config, attn_implementation="sdpa", dtype=torch.float32))
    if text["model_type"] == "llama":
        use_fast_layers(language_model)
    return language_model


class KeyValueCache:
    """Keys and values of all layers, in memory taken once; each layer appends and reads a view."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self._capacity = capacity
        self._store: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self._lengths = [0] * num_layers

    def truncate(self, length: int) -> None:
        """Forget all columns from `length` on."""
        self._lengths = [length for _ in self._lengths]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, H, T, D] to a layer, and return all that the layer holds; the name is transformers'."""
        held = self._store[layer]
        if held is None:
            b, h, _t, d = keys.shape
            held = (keys.new_empty(b, h, self._capacity, d), values.new_empty(b, h, self._capacity, d))
            self._store[layer] = held
        start = self._lengths[layer]
        end = start + keys.shape[2]
        held[0][:, :, start:end] = keys
        held[1][:, :, start:end] = values
        self._lengths[layer] = end
        return held[0][:, :, :end], held[1][:, :, :end]


def run_layers(
    language_model: nn.Module,
    embeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    read: slice,
    cache: KeyValueCache | None = None,
) -> torch.Tensor:
    """Embeddings [B, S, H] -> states [B, T, H] before the final norm, at the columns that `read` picks.

    Positions are [B, S], or [1, S] when all rows share them. A boolean mask [B, 1, S or 1, S + cached] replaces
    `causal`, which without a mask takes the fast kernels.
    """
    decoder = cast(Any, language_model).model
    rotary = decoder.rotary_emb(embeds, position_ids=positions)
    common = {"position_embeddings": rotary, "past_key_values": cache}
    hidden = embeds
    *body, last = decoder.layers
    for layer in body:
        hidden = layer(hidden, attention_mask=mask, is_causal=causal, **common)
    if isinstance(last, LlamaLayer):
        mask, causal = _mask_of_read(mask, causal, read, embeds.shape[1], embeds.device)
        return cast(torch.Tensor, last(hidden, attention_mask=mask, is_causal=causal, read=read, **common))
    hidden = last(hidden, attention_mask=mask, is_causal=causal, **common)
    return cast(torch.Tensor, hidden[:, read])


def _mask_of_read(
    mask: torch.Tensor | None, causal: bool, read: slice, size: int, device: torch.device
) -> tuple[torch.Tensor | None, bool]:
    """The rows of the mask that belong to the columns read; a causal flag becomes such rows."""
    if read == slice(0, size):
        return mask, causal
    if mask is not None:
        return (mask if mask.shape[2] == 1 else mask[:, :, read]), False
    if not causal or read == slice(size - 1, size):  # the last column sees everything
        return None, False
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()[read], False
