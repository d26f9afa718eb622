"""Decoding as CUDA graphs: a few tokens of a large model are hundreds of small kernels, which take longer to launch
than to run. A pass of a known shape is recorded once and replayed as a whole.

    first time that a shape occurs    run without a graph, which also warms up the kernels
    second time                       recorded, then replayed
    from then on                      inputs copied into the recording's own, replayed, outputs copied out

Batches are padded to a power of two and prompts to a multiple of eight, so that few shapes occur. Recordings share one
memory pool (`vlarl/recording.py`), which stays allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vlarl.decisions import Decisions, TensorRows
from vlarl.recording import Recorder, Replay

Sample = Callable[[TensorRows, torch.Tensor], Decisions]
"""Inputs and noise on the device -> decisions."""


@dataclass(frozen=True)
class _Recording:
    graph: Replay
    inputs: TensorRows
    noise: torch.Tensor
    decisions: Decisions


class GraphedSampling:
    """Replays recordings of `sample`, which must read only its arguments and weights that stay where they are."""

    def __init__(self, sample: Sample, recorder: Recorder) -> None:
        self._sample = sample
        self._recorder = recorder
        self._met: set[tuple[int, ...]] = set()
        self._recordings: dict[tuple[int, ...], _Recording] = {}

    def __call__(self, inputs: TensorRows, noise: torch.Tensor) -> Decisions:
        """The decisions of a batch on the device."""
        rows = len(inputs)
        inputs, noise = pad_batch(inputs, noise)
        key = inputs.shape_key
        if key not in self._met:
            self._met.add(key)
            decisions = self._sample(inputs, noise)
        else:
            if key not in self._recordings:
                self._recordings[key] = self._record(inputs, noise)
            decisions = self._replay(self._recordings[key], inputs, noise)
        return decisions.rows(slice(0, rows))

    def _record(self, inputs: TensorRows, noise: torch.Tensor) -> _Recording:
        own, own_noise = inputs.map(torch.clone), noise.clone()
        graph, decisions = self._recorder.record(lambda: self._sample(own, own_noise))
        return _Recording(graph, own, own_noise, decisions)

    def _replay(self, recording: _Recording, inputs: TensorRows, noise: torch.Tensor) -> Decisions:
        given = iter(inputs.tensors())
        recording.inputs.map(lambda own: own.copy_(next(given)))
        recording.noise.copy_(noise)
        with self._recorder.replaying():
            recording.graph.replay()
            return recording.decisions.map(torch.clone)


def pad_batch(inputs: TensorRows, noise: torch.Tensor) -> tuple[TensorRows, torch.Tensor]:
    """The batch with its last row repeated up to a power of two, and rounded up in its other sizes: rows depend neither
    on each other nor on their padding."""
    missing = (1 << (len(inputs) - 1).bit_length()) - len(inputs)
    padded = inputs.rounded_up().map(lambda column: _repeat_last(column, missing))
    return padded, _repeat_last(noise, missing)


def _repeat_last(tensor: torch.Tensor, times: int) -> torch.Tensor:
    return tensor if times == 0 else torch.cat([tensor, tensor[-1:].expand(times, *tensor.shape[1:])])
