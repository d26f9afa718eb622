"""Three implementations of attention with one definition of which columns each query sees.

An implementation is prepared once for a pass (masks, indices of the tokens that are not padding) and then called by
every layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F

AttentionName = Literal["sdpa", "eager", "flash_attention_2"]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries [B, H, T, D], keys and values [B, G, S, D] with G dividing H -> [B, H, T, D]."""


@dataclass(frozen=True)
class AttentionMask:
    """What queries see: the queries are the columns start .. stop of `size`; `seen` [B, size] is False for padding
    (None: there is no padding).

    Causal means that a column sees itself and those before it. Padding may be anywhere but in the first column; the
    output of a query that is padding is never read.
    """

    start: int
    stop: int
    size: int
    seen: torch.Tensor | None
    causal: bool

    def narrowed(self, read: slice) -> AttentionMask:
        """The same for some of the queries."""
        return AttentionMask(self.start + read.start, self.start + read.stop, self.size, self.seen, self.causal)

    @property
    def sees_all(self) -> bool:
        """Whether causality hides nothing: attention is not causal, or the last column is the only query."""
        return not self.causal or self.start == self.size - 1

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """Boolean [B or 1, 1, T or 1, size], or None when everything is seen."""
        keys = None if self.seen is None else self.seen[:, None, None, :]
        if self.sees_all:
            return keys
        full = torch.ones(self.stop - self.start, self.size, dtype=torch.bool, device=device)
        past = full.tril(self.start)[None, None]
        return past if keys is None else keys & past


def check_attention(name: str) -> None:
    """Refuse an implementation that is unknown or not installed, before a model is built with it."""
    if name not in get_args(AttentionName):
        raise ValueError(f"attention {name!r} is unknown: use one of {', '.join(get_args(AttentionName))}")
    if name == "flash_attention_2":
        _flash_attn()


def prepare(name: AttentionName, attention_mask: AttentionMask, device: torch.device) -> Attend:
    """The implementation of that name for one pass."""
    prepared: dict[AttentionName, Callable[[AttentionMask, torch.device], Attend]] = {
        "sdpa": _sdpa,
        "eager": _eager,
        "flash_attention_2": _Flash,
    }
    return prepared[name](attention_mask, device)


def _sdpa(attention_mask: AttentionMask, device: torch.device) -> Attend:
    num_queries = attention_mask.stop - attention_mask.start
    square = attention_mask.seen is None and attention_mask.causal and num_queries == attention_mask.size
    mask = None if square else attention_mask.mask(device)  # PyTorch's own causal flag selects the fast kernels

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=square, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def _eager(attention_mask: AttentionMask, device: torch.device) -> Attend:
    """The formula as written, softmax in float32: for inspection, and as a reference for the others."""
    mask = attention_mask.mask(device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        scores = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
        mixed: torch.Tensor = scores.softmax(dim=-1).to(v.dtype) @ v
        return mixed

    return attend


class _Flash:
    """The flash-attn package. Its causal mask aligns the last query with the last key, so keys after it are cut off;
    rows of different length are concatenated, without their padding."""

    def __init__(self, mask: AttentionMask, _device: torch.device) -> None:
        self.causal = not mask.sees_all
        self.num_keys = mask.stop if self.causal else mask.size
        self.indices: tuple[torch.Tensor, torch.Tensor] | None = None
        if mask.seen is not None:
            queries, keys = mask.seen[:, mask.start : mask.stop], mask.seen[:, : self.num_keys]
            self.indices = queries.flatten().nonzero()[:, 0], keys.flatten().nonzero()[:, 0]
            lengths = [part.sum(dim=1, dtype=torch.int32) for part in (queries, keys)]
            self.bounds = [F.pad(length.cumsum(0, dtype=torch.int32), (1, 0)) for length in lengths]
            self.longest = [int(length.max()) for length in lengths]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2)[:, : self.num_keys], v.transpose(1, 2)[:, : self.num_keys]
        if self.indices is None:
            dense: torch.Tensor = _flash_attn().flash_attn_func(q, k, v, causal=self.causal)
            return dense.transpose(1, 2)
        of_queries, of_keys = self.indices
        flat = (q.flatten(0, 1)[of_queries], k.flatten(0, 1)[of_keys], v.flatten(0, 1)[of_keys])
        mixed = _flash_attn().flash_attn_varlen_func(*flat, *self.bounds, *self.longest, causal=self.causal)
        out = torch.zeros_like(q).flatten(0, 1).index_copy(0, of_queries, mixed)
        return out.view(q.shape).transpose(1, 2)


def _flash_attn() -> Any:
    try:
        return importlib.import_module("flash_attn")
    except ImportError as error:
        raise ValueError(
            "attention 'flash_attention_2' needs the flash-attn package, which is not installed: run "
            "`pip install flash-attn --no-build-isolation`, or use 'sdpa'"
        ) from error
