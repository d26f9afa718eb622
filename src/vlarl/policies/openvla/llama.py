"""Drop-in layers for transformers' Llama: the same parameters and answers, less work.

At the sizes that RL runs at on a CPU, the library's rotary embedding and RMS norm take a fifth of a layer's time, all
of it elementwise passes; here a rotation is four half-width kernels, forward and backward. And the last layer computes
queries and MLP only for the few columns that predict actions.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP


class _Rotate(torch.autograd.Function):
    """The rotation's gradient is the opposite rotation, so nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [B, S, heads, D] by angles [B or 1, S, 1, D/2]."""
    return cast(torch.Tensor, _Rotate.apply(x, cos, sin))  # type: ignore[no-untyped-call]


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        out: torch.Tensor = (x * inverse).mul_(weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse
        product = grads[0] * normed
        along = (product @ weight).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grads[0] * weight).addcmul_(normed, along, value=-1).mul_(inverse)
        return grad_x, product.flatten(0, -2).sum(0), None


class RMSNorm(nn.Module):
    """Root-mean-square norm with the library's parameter name."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        if x.device.type == "cpu" and x.dtype == torch.float32:
            # PyTorch has a fused kernel on CUDA only; on a CPU its norm is a dozen passes.
            return cast(torch.Tensor, _RMSNormFunction.apply(x, self.weight, self.eps))  # type: ignore[no-untyped-call]
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LlamaSelfAttention(nn.Module):
    """Self-attention with the library's parameter names."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)

    def forward(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        causal: bool,
        cache: Any,
        read: slice,
    ) -> torch.Tensor:
        """[B, S, H] -> [B, T, H], for the columns that `read` picks; they see all that the mask lets them."""
        b, s, _width = x.shape
        half = self.head_dim // 2
        cos, sin = (angle[..., :half].unsqueeze(2) for angle in angles)
        q = self.q_proj(x[:, read]).unflatten(-1, (-1, self.head_dim))
        k = rotate(self.k_proj(x).view(b, s, -1, self.head_dim), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        q = rotate(q, cos[:, read], sin[:, read]).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=self.grouped)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class LlamaLayer(GradientCheckpointingLayer):
    """One layer with the library's parameter names and call, and `read`: the columns whose states are wanted."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LlamaSelfAttention(config, layer_idx)
        self.mlp: nn.Module = cast(Any, LlamaMLP)(config)  # untyped in the library
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        is_causal: bool = False,
        read: slice | None = None,
    ) -> torch.Tensor:
        """[B, S, H] -> [B, S, H], or [B, T, H] at the columns read."""
        read = read or slice(0, hidden_states.shape[1])
        normed = self.input_layernorm(hidden_states)
        mixed = self.self_attn(normed, position_embeddings, attention_mask, is_causal, past_key_values, read)
        hidden = hidden_states[:, read] + mixed
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def use_fast_layers(language_model: nn.Module) -> None:
    """Replace the layers of a transformers Llama that has random or no weights yet."""
    decoder = cast(Any, language_model).model
    config = decoder.config
    decoder.layers = nn.ModuleList(LlamaLayer(config, index) for index in range(config.num_hidden_layers))
    decoder.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
