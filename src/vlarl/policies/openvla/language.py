"""Running a transformers decoder layer by layer, with masks and positions that we choose.

The loop over the layers is ours because the library's own forward does not support what the decoders need:
bidirectional attention, positions that skip padding in the middle, states before the final norm. The layers, their
parameters and their hooks (LoRA, FSDP) remain the library's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from vlarl.policies.openvla.attention import AttentionMask, AttentionName, check_attention, prepare
from vlarl.policies.openvla.config import language_config
from vlarl.policies.openvla.recompute import recomputed


def build_language_model(text: Mapping[str, Any], attention: AttentionName = "sdpa") -> nn.Module:
    """A transformers causal language model with random weights from the `text_config` of a checkpoint."""
    from transformers import AutoModelForCausalLM  # imported here: its models take seconds to load

    from vlarl.policies.openvla.layers import use_fast_layers

    check_attention(attention)
    config = language_config(text)
    config.use_cache = False
    build = cast(Any, AutoModelForCausalLM).from_config  # untyped in the library
    language_model = cast(nn.Module, build(config, attn_implementation="sdpa", dtype=torch.float32))
    use_fast_layers(language_model)
    cast(Any, language_model).attention = attention
    return language_model


class KeyValueCache:
    """Keys and values of all layers, in memory allocated once; each layer appends and reads a view."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self._capacity = capacity
        self._store: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self._lengths = [0] * num_layers

    @property
    def length(self) -> int:
        """Columns stored for the first layer, and so for all layers before a pass."""
        return self._lengths[0]

    def truncate(self, length: int) -> None:
        """Forget all columns from `length` on."""
        self._lengths = [length for _ in self._lengths]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, H, T, D] to a layer and return all that is stored for it; the name is transformers'."""
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
    seen: torch.Tensor | None,
    causal: bool,
    read: slice,
    cache: KeyValueCache | None = None,
) -> torch.Tensor:
    """Embeddings [B, S, H] -> states [B, T, H] before the final norm, at the columns that `read` picks.

    Positions are [B, S], or [1, S] when all rows share them. `seen` [B, cached + S] is True for tokens and False for
    padding; None: there is no padding.
    """
    model = cast(Any, language_model)
    size = embeds.shape[1]
    cached = 0 if cache is None else cache.length
    _check_window(model.config, cached + size)
    attention_mask = AttentionMask(cached, cached + size, cached + size, seen, causal)
    angles = model.model.rotary_emb(embeds, position_ids=positions)
    *body, last = model.model.layers
    hidden = embeds
    attend = prepare(model.attention, attention_mask, embeds.device)
    for layer in body:
        hidden = _run_layer(layer, hidden, angles=angles, attend=attend, read=slice(0, size), cache=cache)
    if read != slice(0, size):
        attend = prepare(model.attention, attention_mask.narrowed(read), embeds.device)
    return _run_layer(last, hidden, angles=angles, attend=attend, read=read, cache=cache)


def _run_layer(layer: Any, hidden: torch.Tensor, **others: Any) -> torch.Tensor:
    if layer.recompute and layer.training and others["cache"] is None:  # a cache is written once
        return recomputed(layer, hidden, **others)
    return cast(torch.Tensor, layer(hidden, **others))


def _check_window(config: Any, size: int) -> None:
    window = getattr(config, "sliding_window", None)
    if window is not None and size > window:
        raise ValueError(
            f"a sequence of {size} tokens is longer than the language model's sliding window of {window}, which is not "
            "implemented since images, prompt and actions are far shorter: use fewer images or a shorter prompt"
        )
