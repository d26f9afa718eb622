"""What `vlarl bench` needs of a policy: random inputs, counts of the work in a pass, and the same work done by a peer.

Policy.bench_model() ──► BenchModel ──► Work     what a pass has to compute and to read, counted from the sizes
                             └────────► Peer     the same weights in transformers' own classes, trained by peft
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vlarl.decisions import Decisions, TensorRows
from vlarl.types import Observation


@dataclass(frozen=True)
class Work:
    """One pass: what it has to compute and to read, at the least. Counted, not measured.

    >>> Work(flops=4 * 10**12, num_bytes=14 * 10**9).seconds(flops_per_s=8e14, bytes_per_s=4e12)  # products are slower
    0.005
    """

    flops: int  # of matrix products and attention, as torch.utils.flop_counter counts them
    num_bytes: int  # of the weights, and of the keys and values of earlier passes

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The least time for it at these rates: computing and reading overlap."""
        return max(self.flops / flops_per_s, self.num_bytes / bytes_per_s)


class PeerTrainer(Protocol):
    """The peer's way to train adapters."""

    name: str

    def update(self, inputs: TensorRows, decisions: Decisions, microbatch_size: int) -> float:
        """One optimizer step that makes the decisions likelier; returns the loss."""
        ...

    def logprobs(self, inputs: TensorRows, decisions: Decisions) -> torch.Tensor:
        """[B, L] the log-prob of each element."""
        ...


class Peer(Protocol):
    """The model as users of transformers run it, on the policy's own weights: nothing is loaded twice."""

    name: str

    def generate(self, inputs: TensorRows) -> torch.Tensor:
        """[B, L] the greedy tokens of each row."""
        ...

    def prefill(self, inputs: TensorRows) -> torch.Tensor:
        """The logits after the prompt."""
        ...

    def trainer(self, rank: int) -> PeerTrainer:
        """Adapters on the peer's language model; from here on the peer has them."""
        ...


class BenchModel(Protocol):
    """A policy as `vlarl bench` measures it."""

    decision: str  # what it samples at an observation, such as `7-token action`

    def inputs(self, rows: int, seed: int) -> TensorRows:
        """Random observations as the policy reads them, on the host."""
        ...

    def decisions(self, rows: int, seed: int) -> Decisions:
        """Random decisions, on the host."""
        ...

    def observation(self, seed: int) -> Observation:
        """A random observation as an environment shows it, with a prompt as long as those of `inputs`."""
        ...

    def tokens(self, decisions: Decisions) -> torch.Tensor:
        """[B, L] what was sampled, to be compared with a peer's."""
        ...

    def prefill(self, inputs: TensorRows) -> torch.Tensor:
        """The pass over images and prompt, without what is sampled after it."""
        ...

    def generation_work(self, rows: int, rank: int | None) -> Sequence[Work]:
        """The passes that sample decisions, one after the other; with a rank, through adapters."""
        ...

    def prefill_work(self, rows: int, rank: int | None) -> Sequence[Work] | None:
        """The pass over images and prompt; None where sampling is one pass, of which it is a part."""
        ...

    def update_work(self, rows: int, rank: int | None, recompute: bool) -> Sequence[Work]:
        """Forward and backward of one microbatch; with `recompute` layers run forward a second time."""
        ...

    def peer(self) -> Peer:
        """The same model in transformers; the policy must have no adapters. UsageError if there is none."""
        ...
