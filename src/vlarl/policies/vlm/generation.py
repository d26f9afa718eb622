"""Batched sampling of texts with a cache of keys and values.

    prompts, padded on the left ─► one pass ─► states ─► logits ─► token ─┐
                                                  ▲                       │ until every row has stopped,
                                                  └─ one pass of a token ◄┘ or `max_tokens`

A row's text depends on its own prompt and its own noise: one uniform number for each token. Rows that have stopped are
carried along, and nothing of them changes any more. Placeholders of images are never sampled: the model would look for
an image in the text that it wrote itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vlarl.decisions import Sampling
from vlarl.policies import distribution
from vlarl.policies.vlm.decisions import TextSample
from vlarl.policies.vlm.model import ModelAccess, Prefix, following
from vlarl.policies.vlm.token_passes import TokenPasses

DEFAULT_MAX_TOKENS = 256
SPARE_TOKENS = 4  # beyond the bytes of a stop string: tokens of a character that the tail begins in the middle of


@dataclass(frozen=True)
class Stops:
    """What ends a text."""

    tokens: tuple[int, ...]
    strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]  # special tokens included

    @property
    def longest(self) -> int:
        """Tokens that a stop string may extend over."""
        return max(len(string.encode()) for string in self.strings) + SPARE_TOKENS

    def reached(self, ids: Sequence[int]) -> bool:
        """Whether the last of these tokens completes a stop string."""
        tail = list(ids[-self.longest :])
        after, before = self.decode(tail), self.decode(tail[:-1])
        return any(after.count(string) > before.count(string) for string in self.strings)


def max_tokens(sampling: Sampling) -> int:
    """The longest text, in tokens."""
    return sampling.max_tokens or DEFAULT_MAX_TOKENS


@torch.no_grad()
def generate(
    access: ModelAccess,
    prefix: Prefix,
    passes: TokenPasses,
    noise: torch.Tensor,
    sampling: Sampling,
    stops: Stops,
) -> tuple[TextSample, torch.Tensor]:
    """A text for each row, and the log-probs [B, L] of its tokens over the whole vocabulary at the temperature.

    `noise` [B, at least `max_tokens`] holds uniforms. Greedy tokens, at temperature 0, are scored at temperature 1.
    """
    ending, never = (
        torch.tensor(tokens, dtype=torch.int64, device=prefix.ids.device)
        for tokens in (stops.tokens, access.placeholders)
    )
    limit = max_tokens(sampling)
    positions = following(prefix, limit)
    alive = torch.ones(len(prefix.ids), dtype=torch.bool, device=prefix.ids.device)
    stopped = torch.zeros_like(alive)
    length = torch.zeros(len(alive), dtype=torch.int64, device=alive.device)
    ids: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    states = passes.first()
    for index in range(limit):
        logits = access.logits(states)
        banned = torch.cat([never, ending]) if index < sampling.min_tokens else never
        chosen = choose(logits.index_fill(-1, banned, -torch.inf), noise[:, index], sampling)
        logprobs.append(distribution.token_logprobs(logits, chosen, sampling.temperature or 1.0))
        ids.append(torch.where(alive, chosen, 0))
        length += alive
        ends = torch.isin(chosen, ending)
        if stops.strings and index + 1 >= sampling.min_tokens:
            ends |= _completes(ids, alive, stops)
        stopped |= alive & ends
        alive = alive & ~ends
        if not alive.any() or index + 1 == limit:
            break
        states = passes.next(ids[-1], alive, positions[..., index : index + 1])
    return TextSample(torch.stack(ids, dim=1), length, stopped), torch.stack(logprobs, dim=1)


def _completes(ids: Sequence[torch.Tensor], alive: torch.Tensor, stops: Stops) -> torch.Tensor:
    """[B] whether the last token completes a stop string."""
    rows = zip(torch.stack(list(ids[-stops.longest :]), dim=1).tolist(), alive.tolist(), strict=True)
    return torch.tensor([runs and stops.reached(row) for row, runs in rows], device=alive.device)


def choose(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[B] tokens by logits [B, V] and uniforms [B]."""
    if sampling.temperature == 0:
        return distribution.greedy(logits)
    kept = restrict(logits, sampling)
    return distribution.sample(kept[:, None], sampling.temperature, uniforms[:, None])[:, 0]


def restrict(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits [B, V] with what top-k and then top-p leave out at -inf. Of equally likely tokens top-k keeps all."""
    if 0 < sampling.top_k < logits.shape[-1]:
        lowest = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = (ordered / sampling.temperature).softmax(dim=-1)
        beyond = probs.cumsum(dim=-1) - probs >= sampling.top_p  # likelier tokens already have that much
        beyond[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    return logits
