"""Decoder layers of the language model and of the action expert, with the checkpoint's parameter names."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from vlarl.policies.smolvla.config import TextSizes

ROPE_BASE = 10_000.0  # whatever the backbone's config says: the original's own rotation ignores it


class KeyValue(NamedTuple):
    """What a layer of the language model shows to later tokens."""

    keys: torch.Tensor  # [B, P, kv_heads, head_dim], rotated
    values: torch.Tensor  # [B, P, kv_heads, head_dim]

    def followed_by(self, other: KeyValue) -> KeyValue:
        """Both, these first, in the other's type."""
        kind = other.keys.dtype
        return KeyValue(
            torch.cat([self.keys.to(kind), other.keys], dim=1), torch.cat([self.values.to(kind), other.values], dim=1)
        )


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32 or better."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, width] -> the same shape and type."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[B, L, heads, head_dim] with rotary embeddings of positions [B, L]."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device).float() * (2.0 / x.shape[-1])
    angles = (positions[..., None].float() / ROPE_BASE**exponents)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention. `width` is that of the states that keys and values are made of."""

    def __init__(self, sizes: TextSizes, width: int) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.grouped = sizes.heads != sizes.kv_heads
        queries, keys, bias = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.attention_bias
        self.q_proj = nn.Linear(sizes.hidden, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, sizes.hidden, bias=bias)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, L, heads, head_dim] rotated."""
        return rotated(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), positions)

    def shown(self, x: torch.Tensor, positions: torch.Tensor) -> KeyValue:
        """Keys, rotated, and values of the same states."""
        keys, values = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return KeyValue(rotated(keys, positions), values)

    def projected(self, seen: KeyValue) -> KeyValue:
        """Keys and values made of the language model's, which are rotated already."""
        kind = self.k_proj.weight.dtype
        keys = self.k_proj(seen.keys.to(kind).flatten(2)).unflatten(-1, (-1, self.head_dim))
        values = self.v_proj(seen.values.to(kind).flatten(2)).unflatten(-1, (-1, self.head_dim))
        return KeyValue(keys, values)

    def forward(self, queries: torch.Tensor, seen: KeyValue, mask: torch.Tensor) -> torch.Tensor:
        """Queries [B, L, heads, head_dim] and a mask [B, L, P] of what each may see -> [B, L, hidden]."""
        q, k, v = (part.transpose(1, 2) for part in (queries, *seen))
        mixed = F.scaled_dot_product_attention(q, k, v, mask.unsqueeze(1), enable_gqa=self.grouped)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Gated with SiLU."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(sizes.hidden, sizes.inner, bias=sizes.mlp_bias) for _ in range(2))
        self.down_proj = nn.Linear(sizes.inner, sizes.hidden, bias=sizes.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L, hidden] -> the same shape."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """A layer whose tokens attend to what came before them and to each other, as the mask says.

    Those of the language model read a prefix. Those of the expert that attend jointly read the keys and values of the
    language model's layer before their own.
    """

    def __init__(self, sizes: TextSizes, width: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(sizes, sizes.hidden if width is None else width)
        self.mlp = Mlp(sizes)
        self.input_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = RMSNorm(sizes.hidden, sizes.eps)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, before: KeyValue | None
    ) -> tuple[torch.Tensor, KeyValue]:
        """States [B, L, hidden] at positions [B, L], and a mask [B, L, P + L]; returns also what they show."""
        normed = self.input_layernorm(x)
        own = self.self_attn.shown(normed, positions)
        seen = own if before is None else before.followed_by(own)
        x = x + self.self_attn(self.self_attn.queries(normed, positions), seen, mask)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out, own


class ExpertLayer(DecoderLayer):
    """A layer of the expert that attends to the prefix and to the actions before."""


class ExpertNorm(RMSNorm):
    """The expert's last norm."""


class ExpertLinear(nn.Linear):
    """A projection between the expert and the robot's values."""


class CrossLayer(ExpertLayer):
    """A layer of the expert that attends to the prefix alone, by projections of the language model's keys and values.
    Its positions start at 0."""

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, before: KeyValue | None
    ) -> tuple[torch.Tensor, KeyValue]:
        """As DecoderLayer; of the mask [B, L, P + L] only the prefix's part counts."""
        assert before is not None, "there is no prefix to attend to"
        normed = self.input_layernorm(x)
        queries = self.self_attn.queries(normed, positions - positions.amin(dim=1, keepdim=True))
        seen = self.self_attn.projected(before)
        x = x + self.self_attn(queries, seen, mask[:, :, : seen.keys.shape[1]])
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out, seen
