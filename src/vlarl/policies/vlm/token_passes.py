"""Passes of one token after the prompts, with the keys and values of all tokens before it.

    GrowingPasses    the library's own cache, a column longer with every pass; any model on any device
    FixedPasses      a cache with columns for the next tokens: all passes have one shape and read the same memory

On a GPU the second of the fixed passes is recorded as a CUDA graph, and the others replay it: a pass of a large model
is hundreds of small kernels, which take longer to launch than to run. A recording takes about as long as a pass, so it
is made for each batch, and its memory is free again when the texts are complete.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, StaticLayer

from vlarl.policies.vlm.model import ModelAccess, Prefix

FIRST_COLUMNS = 256  # that a fixed cache has for a text; twice as many follow when they are full


class TokenPasses(Protocol):
    """The states before each token of the texts, pass by pass."""

    def first(self) -> torch.Tensor:
        """[B, H] after the prompts."""

    def next(self, ids: torch.Tensor, read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, H] after tokens ids [B] at positions [B, 1] or [3, B, 1]; later passes see those that are `read` [B]."""


def token_passes(access: ModelAccess, prefix: Prefix, longest: int, recorded: bool) -> TokenPasses:
    """The passes of texts of up to `longest` tokens; `recorded` wants CUDA graphs, which not every model allows."""
    if recorded and allows_fixed_passes(access):
        return FixedPasses(access, prefix, record=True, columns=min(longest, FIRST_COLUMNS))
    return GrowingPasses(access, prefix)


def allows_fixed_passes(access: ModelAccess) -> bool:
    """Whether no shape of a pass and no branch of it depends on the tokens: the library says so of its models, but a
    mixture's experts and 8-bit layers look at their input, and only PyTorch's attention reads a mask as it is here."""
    model, config = access.model, access.text_config
    quantised = getattr(model, "is_quantized", False)
    one_kind = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    return bool(
        model._can_compile_fullgraph
        and not access.is_mixture
        and not quantised
        and config._attn_implementation == "sdpa"
        and set(getattr(config, "layer_types", None) or one_kind) == {"full_attention"}
    )


class GrowingPasses:
    """Passes with the library's own cache."""

    def __init__(self, access: ModelAccess, prefix: Prefix) -> None:
        self._access = access
        self._prefix = prefix
        self._mask = prefix.mask
        self._cache: Any = None

    def first(self) -> torch.Tensor:
        """[B, H] after the prompts."""
        prefix = self._prefix
        found = self._access.run(prefix.ids, self._mask, prefix.positions, prefix.extra, keep_cache=True)
        self._cache = found.cache
        return found.states[:, -1]

    def next(self, ids: torch.Tensor, read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, H] after these tokens."""
        self._mask = torch.cat([self._mask, read[:, None]], dim=1)
        found = self._access.run(ids[:, None], self._mask, positions, cache=self._cache, keep_cache=True)
        return found.states[:, -1]


class FixedPasses:
    """Passes of one shape; `record` replays them as CUDA graphs."""

    def __init__(self, access: ModelAccess, prefix: Prefix, *, record: bool, columns: int) -> None:
        self._access = access
        self._prefix = prefix
        self._record = record
        self._columns = columns  # that the cache gets next
        self._written = prefix.ids.shape[1]
        self._cache: Any = None
        self._mask = prefix.mask[:, None, None]  # [B, 1, 1, all columns]
        self._ids = torch.zeros_like(prefix.ids[:, :1])
        self._positions = torch.zeros_like(prefix.positions[..., :1])
        self._passes = 0  # since the cache was last enlarged
        self._graph: torch.cuda.CUDAGraph | None = None
        self._states: torch.Tensor | None = None

    def first(self) -> torch.Tensor:
        """[B, H] after the prompts."""
        prefix = self._prefix
        found = self._access.run(prefix.ids, prefix.mask, prefix.positions, prefix.extra, keep_cache=True)
        self._cache = Cache(layers=[_fixed(layer, self._written) for layer in found.cache.layers])
        self._enlarge()
        return found.states[:, -1]

    def next(self, ids: torch.Tensor, read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, H] after these tokens; overwritten by the next pass."""
        if self._written == self._mask.shape[-1]:
            self._enlarge()
        self._ids.copy_(ids[:, None])
        self._positions.copy_(positions)
        self._mask[..., self._written] = read[:, None, None]
        self._written += 1
        self._passes += 1
        if self._record and self._passes == 2:  # the first one has warmed up the kernels
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._states = self._pass()
        if self._graph is None or self._states is None:
            return self._pass()
        self._graph.replay()
        return self._states

    def _pass(self) -> torch.Tensor:
        found = self._access.run(self._ids, self._mask, self._positions, cache=self._cache, keep_cache=True)
        return found.states[:, -1]

    def _enlarge(self) -> None:
        """Add empty columns to keys, values and mask, twice as many each time; what was recorded read the old ones."""
        self._graph = self._states = None
        self._passes, columns = 0, self._columns
        self._columns *= 2
        for layer in self._cache.layers:
            layer.keys, layer.values = (F.pad(tensor, (0, 0, 0, columns)) for tensor in (layer.keys, layer.values))
            layer.max_cache_len += columns
        self._mask = F.pad(self._mask, (0, columns))


def _fixed(layer: Any, columns: int) -> StaticLayer:
    """The same keys and values in a layer that is written in place, at the column that it counts itself."""
    fixed: Any = StaticLayer(columns)
    fixed.lazy_initialization(layer.keys[:, :, :0], layer.values[:, :, :0])
    fixed.keys, fixed.values = layer.keys, layer.values
    fixed.cumulative_length.fill_(columns)
    made: StaticLayer = fixed
    return made
