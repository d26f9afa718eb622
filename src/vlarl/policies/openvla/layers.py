"""Drop-in layers for transformers' Llama, Mistral and Qwen2: the same parameters and results with less computation.

At the sizes used for RL on a CPU, the library's rotary embedding and RMS norm take a fifth of a layer's time, all of it
in elementwise passes; here a rotation is four half-width kernels, forward and backward. The last layer computes queries
and MLP only for the few columns that predict actions.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from vlarl.policies.openvla.attention import Attend
from vlarl.policies.openvla.heads import TiedHead


class _Rotate(torch.autograd.Function):
    """The rotation's gradient is the inverse rotation, so only the angles are saved."""

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


class SelfAttention(nn.Module):
    """Self-attention with the projections of a layer of the library."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.layer_idx = int(library.layer_idx)
        self.head_dim = int(library.head_dim)
        self.q_proj: nn.Module = library.q_proj
        self.k_proj: nn.Module = library.k_proj
        self.v_proj: nn.Module = library.v_proj
        self.o_proj: nn.Module = library.o_proj

    def forward(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], attend: Attend, cache: Any, read: slice
    ) -> torch.Tensor:
        """[B, S, H] -> [B, T, H], for the columns that `read` picks; `attend` applies the attention mask."""
        half = self.head_dim // 2
        cos, sin = (angle[..., :half].unsqueeze(2) for angle in angles)
        q, k, v = (
            projection(of).unflatten(-1, (-1, self.head_dim))
            for projection, of in ((self.q_proj, x[:, read]), (self.k_proj, x), (self.v_proj, x))
        )
        q = rotate(q, cos[:, read], sin[:, read]).transpose(1, 2)
        k, v = rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out: torch.Tensor = self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class DecoderLayer(nn.Module):
    """A layer of the library with the same parameters, and `read`: the columns whose states are computed."""

    def __init__(self, library: Any, eps: float) -> None:
        super().__init__()
        self.recompute = False  # in the backward pass instead of saving activations
        width = library.input_layernorm.weight.shape[0]
        self.self_attn = SelfAttention(library.self_attn)
        self.mlp: nn.Module = library.mlp
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    @property
    def last_product(self) -> Any:
        """The linear layer whose output nothing but a sum reads."""
        return cast(Any, self.mlp).down_proj

    def forward(
        self,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        read: slice,
        cache: Any = None,
    ) -> torch.Tensor:
        """[B, S, H] -> [B, T, H] at the columns read."""
        mixed = self.self_attn(self.input_layernorm(hidden), angles, attend, cache, read)
        hidden = hidden[:, read] + mixed
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def use_fast_layers(language_model: nn.Module) -> None:
    """Replace the layers of a transformers decoder that has no trained weights yet; projections and MLPs are reused."""
    decoder = cast(Any, language_model).model
    eps = float(decoder.config.rms_norm_eps)
    decoder.layers = nn.ModuleList(DecoderLayer(layer, eps) for layer in decoder.layers)
    decoder.norm = RMSNorm(decoder.config.hidden_size, eps)
    if decoder.config.tie_word_embeddings:
        cast(Any, language_model).lm_head = TiedHead(decoder.embed_tokens)
