"""Two ways to decode actions with one model. Both lay out a row as

    BOS  image tokens  [proprio]  padding  rest of the prompt  action part

and skip the padding by positions and mask, so that a row gives the same result in any batch, and the last token of the
prompt and the action part are in the same columns for all rows. With a tokenizer without BOS (Qwen2's) the first token
of the prompt takes its position, as in the original code.

    autoregressive   action part = the tokens so far, causal attention; token t is read at the token before it
    parallel (OFT)   action part = K*D zero or learned slots and the stop id, every token sees every token; token t is
                     read one column before its slot, the first one at the last token of the prompt
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from vlarl.policies.openvla.config import DecoderName
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.language import KeyValueCache, run_layers
from vlarl.policies.openvla.model import OpenVLAModel

Chooser = Callable[[torch.Tensor, int], torch.Tensor]
"""Picks tokens: (logits [B, T, num_bins], index of the first of these T tokens) -> action-bin indices [B, T]."""


@dataclass(frozen=True)
class Prefix:
    """Embedded prompt and images of a batch; padding, where a row needs it, comes before the rest of its prompt."""

    embeds: torch.Tensor  # [B, S, H]
    padding: torch.Tensor | None  # [B] columns of padding in each row; None when no row has any
    head: int  # columns before the padding: BOS, images, proprio

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """Positions of the columns start .. stop, which may extend into the action part: [B, T], or [1, T]."""
        columns = torch.arange(start, stop, device=self.embeds.device).unsqueeze(0)
        if self.padding is None:
            return columns
        return columns - self.padding.unsqueeze(1) * (columns >= self.head)

    def key_mask(self, tail: int) -> torch.Tensor | None:
        """[B, S + tail] which columns hold tokens, with `tail` more after the prefix; None when all do."""
        if self.padding is None:
            return None
        columns = torch.arange(self.embeds.shape[1] + tail, device=self.embeds.device).unsqueeze(0)
        return (columns < self.head) | (columns >= self.head + self.padding.unsqueeze(1))

    def read(self, num_tokens: int) -> slice:
        """The columns that predict the first `num_tokens` tokens of the action part."""
        last = self.embeds.shape[1] - 1
        return slice(last, last + num_tokens)


def embed_prefix(model: OpenVLAModel, inputs: OpenVLAInputs, proprio_projector: nn.Module | None) -> Prefix:
    """Embed prompt, images and, with a projector, the robot's state."""
    ids, padding = _pad_after_bos(inputs)
    text = model.embed_tokens(ids)
    language = _mean_embedding(model, text, padding) if model.config.use_film else None
    parts = [text[:, :1], model.embed_images(inputs.pixels, language)]
    if proprio_projector is not None:
        if inputs.proprio is None:
            raise ValueError("this policy has a proprio token but the input carries no proprio")
        parts.append(proprio_projector(inputs.proprio.to(text.dtype)).unsqueeze(1))
    head = sum(part.shape[1] for part in parts)
    return Prefix(torch.cat([*parts, text[:, 1:]], dim=1), padding, head)


def _mean_embedding(model: OpenVLAModel, text: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """[B, H] the input of FiLM, as in OFT: the mean over the whole prompt and the stop token, without padding."""
    stop_ids = torch.full((text.shape[0], 1), model.config.stop_id, device=text.device)
    stop = model.embed_tokens(stop_ids)
    if padding is None:
        return torch.cat([text, stop], dim=1).mean(dim=1)
    columns = torch.arange(text.shape[1], device=text.device).unsqueeze(0)
    token = (columns == 0) | (columns > padding.unsqueeze(1))
    total = (text.float() * token.unsqueeze(2)).sum(dim=1) + stop[:, 0].float()
    return (total / (token.sum(dim=1, keepdim=True) + 1)).to(text.dtype)


def _pad_after_bos(inputs: OpenVLAInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompt ids with the padding moved from the right to just after the first token, and its length in each row."""
    ids, mask = inputs.input_ids, inputs.attention_mask
    if not inputs.ragged:
        return ids, None
    padding = ids.shape[1] - mask.sum(dim=1)
    source = torch.arange(1, ids.shape[1], device=ids.device) - padding.unsqueeze(1)
    moved = ids.gather(1, source.clamp(min=1))  # the values in the padding are never attended to
    return torch.cat([ids[:, :1], moved], dim=1), padding


class Decoder(Protocol):
    """Computes the states that predict action tokens; the first of them is also the critic's input."""

    def states(self, model: OpenVLAModel, prefix: Prefix, token_ids: torch.Tensor) -> torch.Tensor:
        """Finished states [B, K*D, H] that predict each of the given tokens."""
        ...

    def first_state(self, model: OpenVLAModel, prefix: Prefix) -> torch.Tensor:
        """[B, H] the finished state before the first action token."""
        ...

    def generate(self, model: OpenVLAModel, prefix: Prefix, choose: Chooser) -> tuple[torch.Tensor, torch.Tensor]:
        """Action-bin indices [B, K*D], picked one after the other, and their logits [B, K*D, num_bins]."""
        ...


class AutoregressiveDecoder:
    """OpenVLA's own decoding: one action, token by token."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def states(self, model: OpenVLAModel, prefix: Prefix, token_ids: torch.Tensor) -> torch.Tensor:
        """Teacher-forced, in one pass, without the last token, which predicts nothing."""
        tail = model.embed_tokens(token_ids[:, :-1])
        return model.finish(self._run(model, prefix, torch.cat([prefix.embeds, tail], dim=1), None))

    def first_state(self, model: OpenVLAModel, prefix: Prefix) -> torch.Tensor:
        """Depends on the prompt only."""
        return model.finish(self._run(model, prefix, prefix.embeds, None))[:, 0]

    def generate(self, model: OpenVLAModel, prefix: Prefix, choose: Chooser) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over the prompt, then one token a step with the cache; then, in float32, one pass over all tokens.

        Kernels for one column and for several round differently. The logits returned are those of the last pass, which
        rounds more like `states` does, so that engine and learner agree on a token's probability. In a lower precision
        both round far more than that, and the extra pass would not help.
        """
        cache = KeyValueCache(model.num_layers, prefix.embeds.shape[1] + self.num_tokens - 1)
        first = model.action_logits(model.finish(self._run(model, prefix, prefix.embeds, cache)))
        logits = [first]
        indices = choose(first, 0)
        for step in range(1, self.num_tokens):
            logits.append(model.action_logits(self._extend(model, prefix, indices[:, -1:], step - 1, cache)))
            indices = torch.cat([indices, choose(logits[-1], step)], dim=1)
        if model.dtype == torch.float32:
            cache.truncate(prefix.embeds.shape[1])
            logits = [first, model.action_logits(self._extend(model, prefix, indices[:, :-1], 0, cache))]
        return indices, torch.cat(logits, dim=1)

    def _extend(
        self, model: OpenVLAModel, prefix: Prefix, indices: torch.Tensor, start: int, cache: KeyValueCache
    ) -> torch.Tensor:
        """Finished states of the action tokens from `start` on, which attend to the cache and to each other."""
        columns, count = prefix.embeds.shape[1] + start, indices.shape[1]
        hidden = run_layers(
            model.language_model,
            model.embed_tokens(indices + model.config.first_action_id),
            prefix.positions(columns, columns + count),
            seen=prefix.key_mask(start + count),
            causal=True,
            read=slice(0, count),
            cache=cache,
        )
        return model.finish(hidden)

    def _run(
        self, model: OpenVLAModel, prefix: Prefix, embeds: torch.Tensor, cache: KeyValueCache | None
    ) -> torch.Tensor:
        """States from the last token of the prompt on."""
        size = embeds.shape[1]
        tail = size - prefix.embeds.shape[1]
        return run_layers(
            model.language_model,
            embeds,
            prefix.positions(0, size),
            seen=prefix.key_mask(tail),
            causal=True,  # columns are in the order of positions, so causal over columns is causal over tokens
            read=prefix.read(tail + 1),
            cache=cache,
        )


class ParallelDecoder:
    """OpenVLA-OFT's decoding: a chunk of actions in one pass, tokens independent given the observation."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def states(self, model: OpenVLAModel, prefix: Prefix, token_ids: torch.Tensor) -> torch.Tensor:
        """One pass, which does not depend on the tokens."""
        del token_ids
        return self._run(model, prefix, self.num_tokens)

    def first_state(self, model: OpenVLAModel, prefix: Prefix) -> torch.Tensor:
        """Needs the slots too, since the prompt attends to them."""
        return self._run(model, prefix, 1)[:, 0]

    def generate(self, model: OpenVLAModel, prefix: Prefix, choose: Chooser) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens at once."""
        logits = model.action_logits(self._run(model, prefix, self.num_tokens))
        return choose(logits, 0), logits

    def _run(self, model: OpenVLAModel, prefix: Prefix, num_read: int) -> torch.Tensor:
        columns = prefix.embeds.shape[1]
        tail = self.num_tokens + 1
        hidden = run_layers(
            model.language_model,
            torch.cat([prefix.embeds, *self.action_part(model, prefix.embeds)], dim=1),
            prefix.positions(0, columns + tail),
            seen=prefix.key_mask(tail),
            causal=False,
            read=prefix.read(num_read),
        )
        return model.finish(hidden)

    def action_part(self, model: OpenVLAModel, like: torch.Tensor) -> list[torch.Tensor]:
        """Slots and stop token, [B, T, H] each. OFT's slots are zeros that differ in their positions only; learned ones
        (padding rows of the embedding, otherwise unused) save a small model from learning to tell them apart."""
        config, batch = model.config, like.shape[0]
        ids = torch.full((1,), config.stop_id, device=like.device)
        if config.learned_slots:
            slots = torch.arange(config.vocab_size, config.vocab_size + self.num_tokens, device=like.device)
            ids = torch.cat([slots, ids])
        embedded = model.embed_tokens(ids.unsqueeze(0)).expand(batch, -1, -1)
        if config.learned_slots:
            return [embedded]
        return [like.new_zeros(batch, self.num_tokens, like.shape[2]), embedded]


DECODERS: dict[DecoderName, Callable[[int], Decoder]] = {
    "autoregressive": AutoregressiveDecoder,
    "parallel": ParallelDecoder,
}
