"""Decoding as CUDA graphs: a few tokens of a large model are hundreds of small kernels, which take longer to launch
than to run. A pass of a known shape is recorded once and replayed as a whole.

    first time that a shape occurs    run without a graph, which also warms up the kernels
    second time                       recorded, then replayed
    from then on                      inputs copied into the recording's own, replayed, outputs copied out

Batches are padded to a power of two and prompts to a multiple of eight, so that few shapes occur. Recordings share one
memory pool, which stays allocated while they exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vlarl.types import PolicyInput

PROMPT_STEP = 8

Decode = Callable[[PolicyInput, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Inputs and uniforms [B, K*D] on the device -> ids and log-probs [B, K*D]."""

Key = tuple[int, ...]


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: PolicyInput
    uniforms: torch.Tensor
    outputs: tuple[torch.Tensor, torch.Tensor]


class GraphedDecoding:
    """Replays recordings of `decode`, which must read nothing but its arguments and weights that stay in place."""

    def __init__(self, decode: Decode, pool: Any) -> None:
        self._decode = decode
        self._pool = pool
        self._seen: set[Key] = set()
        self._recordings: dict[Key, _Recording] = {}

    def __call__(self, inputs: PolicyInput, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log-probs of a batch on the device."""
        rows = len(inputs)
        inputs, uniforms = pad_batch(inputs, uniforms)
        key = (*inputs.input_ids.shape, int(inputs.ragged))
        if key not in self._seen:
            self._seen.add(key)
            ids, logprobs = self._decode(inputs, uniforms)
        else:
            if key not in self._recordings:
                self._recordings[key] = self._record(inputs, uniforms)
            ids, logprobs = self._replay(self._recordings[key], inputs, uniforms)
        return ids[:rows], logprobs[:rows]

    def _record(self, inputs: PolicyInput, uniforms: torch.Tensor) -> _Recording:
        own = PolicyInput(
            inputs.input_ids.clone(),
            inputs.attention_mask.clone(),
            inputs.pixels.clone(),
            None if inputs.proprio is None else inputs.proprio.clone(),
            inputs.ragged,
        )
        own_uniforms = uniforms.clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._decode(own, own_uniforms)
        return _Recording(graph, own, own_uniforms, outputs)

    @staticmethod
    def _replay(
        recording: _Recording, inputs: PolicyInput, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = recording.inputs
        own.input_ids.copy_(inputs.input_ids)
        own.attention_mask.copy_(inputs.attention_mask)
        own.pixels.copy_(inputs.pixels)
        if own.proprio is not None and inputs.proprio is not None:
            own.proprio.copy_(inputs.proprio)
        recording.uniforms.copy_(uniforms)
        recording.graph.replay()
        ids, logprobs = recording.outputs
        return ids.clone(), logprobs.clone()


def pad_batch(inputs: PolicyInput, uniforms: torch.Tensor) -> tuple[PolicyInput, torch.Tensor]:
    """The batch with its last row repeated up to a power of two, and prompts padded to a multiple of eight if they are
    ragged already: rows depend neither on each other nor on their padding."""
    missing = (1 << (len(inputs) - 1).bit_length()) - len(inputs)
    width = inputs.input_ids.shape[1]
    padding = -width % PROMPT_STEP if inputs.ragged else 0
    filled = PolicyInput(
        F.pad(_repeat_last(inputs.input_ids, missing), (0, padding)),
        F.pad(_repeat_last(inputs.attention_mask, missing), (0, padding)),
        _repeat_last(inputs.pixels, missing),
        None if inputs.proprio is None else _repeat_last(inputs.proprio, missing),
        inputs.ragged,
    )
    return filled, _repeat_last(uniforms, missing)


def _repeat_last(tensor: torch.Tensor, times: int) -> torch.Tensor:
    return tensor if times == 0 else torch.cat([tensor, tensor[-1:].expand(times, *tensor.shape[1:])])
