"""Decoding as CUDA graphs: a few tokens of a large model are hundreds of small kernels, which take longer to launch
than to run. A pass of a known shape is recorded once and replayed as a whole.

    first time that a shape occurs    run without a graph, which also warms up the kernels
    second time                       recorded, then replayed
    from then on                      inputs copied into the recording's own, replayed, outputs copied out
    released                          the memory is free for an update; recorded at once when the shape occurs again

Batches are padded to a power of two and prompts to a multiple of eight, so that few shapes occur. Recordings share one
memory pool (`vlarl/recording.py`), about as large as the largest pass, which stays allocated while they exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.recording import Recorder, Replay

Sample = Callable[[TensorRows, torch.Tensor], Decisions]
"""Inputs and noise on the device -> decisions."""


@dataclass(frozen=True)
class _Recording:
    graph: Replay
    inputs: TensorRows
    noise: torch.Tensor
    decisions: Decisions


class Recordings:
    """Recorded passes by the way of sampling and the shape of the inputs."""

    def __init__(self, recorder: Recorder) -> None:
        self.seconds = 0.0  # that recording has taken
        self._recorder = recorder
        self._met: set[tuple[Sampling, tuple[int, ...]]] = set()
        self._recorded: dict[tuple[Sampling, tuple[int, ...]], _Recording] = {}
        recorder.add(self)

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, sample: Sample, sampling: Sampling, inputs: TensorRows, noise: torch.Tensor) -> Decisions:
        """The decisions of a batch on the device. `sample`, which samples in this way, must read only its arguments and
        weights that stay where they are."""
        rows = len(inputs)
        inputs, noise = pad_batch(inputs, noise)
        key = (sampling, inputs.shape_key)
        if key not in self._met:
            self._recorder.before_first_pass()
            decisions = sample(inputs, noise)
            self._met.add(key)
        else:
            if key not in self._recorded:
                began = time.perf_counter()
                self._recorded[key] = self._record(sample, inputs, noise)
                self.seconds += time.perf_counter() - began
            decisions = self._replay(self._recorded[key], inputs, noise)
        return decisions.rows(slice(0, rows))

    def forget(self) -> bool:
        """Drop all recordings; whether there were any."""
        had = bool(self._recorded)
        self._recorded.clear()
        return had

    def release(self) -> bool:
        """Free the memory of all recordings on this device; whether there were any."""
        return self._recorder.release()

    def _record(self, sample: Sample, inputs: TensorRows, noise: torch.Tensor) -> _Recording:
        own, own_noise = inputs.map(torch.clone), noise.clone()
        graph, decisions = self._recorder.record(lambda: sample(own, own_noise))
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
