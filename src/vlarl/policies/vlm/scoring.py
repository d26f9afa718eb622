"""Log-probs and entropies of tokens over the whole vocabulary, a few positions at a time.

The logits of a batch would be its largest tensor by far: 64 texts of 1024 tokens over 150,000 ids are 39 GB in float32.
So they are computed from the states in chunks of positions, and computed again in the backward pass.

Log-probs are those of the whole vocabulary at the temperature, in sampling and in scoring alike. Top-p, top-k and a
minimum length restrict what is sampled, not what its log-prob is: the policy that is trained is the unrestricted one,
as in TRL and verl.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from vlarl.policies import distribution

CHUNK_BYTES = 128 << 20  # of the float32 logits of a chunk

Head = Callable[[torch.Tensor], torch.Tensor]  # states […, H] -> logits […, V]


def chunk_size(vocabulary: int) -> int:
    """Positions of a chunk."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def score_tokens(
    states: torch.Tensor,
    ids: torch.Tensor,
    head: Head,
    temperature: float,
    *,
    size: int,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [N] of tokens [N] that follow the states [N, H], and the entropies [N] of their distributions."""

    def score(part: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(part)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropy = distribution.token_entropy(logits, temperature)
        return distribution.token_logprobs(logits, chosen, temperature), entropy

    logprobs, entropies = [], []
    for part, chosen in zip(torch.split(states, size), torch.split(ids, size), strict=True):
        if torch.is_grad_enabled():
            found = checkpoint(score, part, chosen, use_reentrant=False, preserve_rng_state=False)
        else:
            found = score(part, chosen)
        logprobs.append(found[0])
        entropies.append(found[1])
    return torch.cat(logprobs), torch.cat(entropies)


def score_texts(
    states: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor,
    head: Head,
    temperature: float,
    *,
    size: int,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for tokens [B, L] after states [B, L, H]; what is masked is 0 and sends no gradient.

    Nothing is computed of masked tokens. Where all are masked, the result still depends on the states, so that a
    backward pass of it runs, with a gradient of zero.
    """
    found = score_tokens(states[mask], ids[mask], head, temperature, size=size, entropy_gradient=entropy_gradient)
    logprobs, entropy = (torch.zeros_like(ids, dtype=each.dtype).masked_scatter(mask, each) for each in found)
    return logprobs, entropy
