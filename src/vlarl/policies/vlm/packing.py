"""Samples of a batch laid end to end in one row, so that no padding is computed.

    padded   . . a a A A .        packed   a a A A b b b b B c C C C
             b b b b B . .
             . . . c C C C        small: a prompt, capital: its text

Attention stays within a sample, and positions start again with each. Kernels for rows of this kind (FlashAttention)
and masks of the library find the samples by those positions: there is no attention mask, and where images have
positions of their own, [4, 1, N] are given, the plain ones first. PyTorch's attention on the whole row would need a
mask of all pairs of tokens, and compute most of them for nothing; so it is called for each sample alone (`attention`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vlarl.errors import UsageError
from vlarl.policies.vlm.inputs import TOKEN_TYPES, VlmInputs
from vlarl.policies.vlm.model import ModelAccess, Pass, Prefix

EACH_SAMPLE = "sdpa_each_sample"  # the name under which the library finds the attention below
KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
PROBE = (3, 5)  # tokens of the samples that a model is tried with


def attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, N, D], as key and value
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_lengths: list[int] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """PyTorch's attention, of each sample by itself where samples are packed; else that of the library."""
    if packed_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    samples = zip(*(torch.split(each, packed_lengths, dim=2) for each in (query, key, value)), strict=True)
    found = [sdpa_attention_forward(module, q, k, v, None, **options)[0] for q, k, v in samples]
    return torch.cat(found, dim=1), None


def _mask(*, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """The library's mask for padded rows; none for packed ones, which have no padding."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **options)


AttentionInterface.register(EACH_SAMPLE, attention)
AttentionMaskInterface.register(EACH_SAMPLE, _mask)


def run_packed(
    access: ModelAccess,
    ids: torch.Tensor,  # [B, C]
    mask: torch.Tensor,  # [B, C] bool: what is not padding; of each row one piece
    positions: torch.Tensor,  # [B, C] or [3, B, C]
    extra: Mapping[str, torch.Tensor],
    last: int,
) -> Pass:
    """One pass over all rows end to end; its states in the padded layout, of the `last` columns, 0 in the padding."""
    lengths = mask.sum(dim=1).tolist()
    counted = (mask.cumsum(dim=1) - 1)[mask]  # [N], from 0 in each sample
    own = positions[..., mask]  # [N] or [3, N]
    own = torch.cat([counted[None], own.expand(3, -1)])[:, None] if access.has_grid_positions else own[None]
    given: dict[str, Any] = {n: column[mask][None] if n in TOKEN_TYPES else column for n, column in extra.items()}
    if access.text_config._attn_implementation == EACH_SAMPLE:
        given["packed_lengths"] = lengths
    found = access.run(ids[mask][None], None, own, given)
    wanted = (torch.arange(mask.shape[1], device=mask.device) >= mask.shape[1] - last).expand_as(mask)
    empty = found.states.new_zeros((len(mask), last, found.states.shape[-1]))
    states = empty.masked_scatter(mask[:, -last:, None], found.states[0, wanted[mask]])
    return Pass(states, None, found.aux_loss)


def enable(access: ModelAccess, with_images: VlmInputs | None) -> None:
    """Prepare a model for packed passes; UsageError where they would not be right.

    `with_images`: prompts of a model that reads images, to try it with, besides short texts.
    """
    name = type(access.model).__name__
    text, own = access.text_config, access.model.config
    layers = set(getattr(text, "layer_types", None) or ())
    if unknown := sorted(layers - KNOWN_LAYERS):
        raise refused(name, f"its layers of type {', '.join(unknown)} carry something from one sample to the next")
    if "token_type_ids" in access.accepted:
        raise refused(name, "its images attend to tokens that follow")
    tried = [_short_texts(access)] + ([] if with_images is None else [access.prefix(with_images)])
    padded = [_logits(access, prefix, packed=False) for prefix in tried]
    windows = "sliding_attention" in layers or getattr(text, "sliding_window", None) is not None
    if text._attn_implementation == "sdpa" and not windows:  # the library's masks know windows
        part = next((part for part in own.sub_configs if getattr(own, part) is text), None)
        access.model.set_attn_implementation(EACH_SAMPLE if part is None else {part: EACH_SAMPLE})
    try:
        found = [_logits(access, prefix, packed=True) for prefix in tried]
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise refused(name, f"it does not run on packed rows ({error})") from error
    for each, expected in zip(found, padded, strict=True):
        if float((each - expected).abs().max()) > 1e-2 * float(expected.abs().max()):
            raise refused(name, "its log-probs would change, as if samples attended to each other")


def refused(name: str, reason: str) -> UsageError:
    """Why a model's samples can't be packed, with what to do."""
    return UsageError(f"optim.packing: samples of {name} can't be packed: {reason}. Set optim.packing to false.")


def _short_texts(access: ModelAccess) -> Prefix:
    """Two prompts of different lengths."""
    rows = [torch.arange(1, size + 1, device=access.device) * 7 % access.vocabulary for size in PROBE]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    sizes = torch.tensor(PROBE, device=access.device)[:, None]
    mask = torch.arange(max(PROBE), device=access.device) >= max(PROBE) - sizes
    return Prefix(ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0), {})


@torch.no_grad()
def _logits(access: ModelAccess, prefix: Prefix, *, packed: bool) -> torch.Tensor:
    """[tokens, V] of all prompts."""
    given = (prefix.ids, prefix.mask, prefix.positions, prefix.extra)
    found = run_packed(access, *given, prefix.ids.shape[1]) if packed else access.run(*given)
    return access.logits(found.states[prefix.mask])
