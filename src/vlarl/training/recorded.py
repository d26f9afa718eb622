"""Updates as CUDA graphs: forward, recomputation and backward of a microbatch are recorded once and replayed.

A pass of a large model launches ten thousand kernels from Python, which takes longer than a small microbatch needs to
run. Replayed, it takes as long as the GPU does.

    first and second time that a shape occurs    run without a graph: gradients come into being, kernels are loaded
    third time                                   recorded, then replayed
    from then on                                 the microbatch is copied into the recording's own, and replayed

A recording adds to gradients and reads weights where they were when it was made. So gradients are zeroed in place,
adapters' low-precision copies are updated before the passes of a minibatch, and recordings are dropped when any of
these has moved. What differs between minibatches but has no shape, the factors of the loss, is read from the device.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from vlarl.algorithms.base import Factor
from vlarl.config.schema import OptimConfig
from vlarl.decisions import TrainBatch
from vlarl.devices import is_out_of_memory
from vlarl.policies.base import Policy
from vlarl.recording import Recorder, Replay, graph_recorder
from vlarl.training.fsdp import Sharding
from vlarl.training.ranks import Ranks
from vlarl.training.update_metrics import PassSums

log = logging.getLogger(__name__)

Pass = Callable[[TrainBatch, bool, Factor, Factor], PassSums]
"""(microbatch on the device, whether the policy is trained, weight of a value, KL coefficient) -> its sums."""

WARM_UPS = 2  # passes of a shape before it is recorded
MAX_RECORDINGS = 16  # shapes; another one takes the place of the one that was replayed least recently


@dataclass(frozen=True)
class _Recording:
    graph: Replay
    part: TrainBatch
    sums: PassSums


class RecordedPasses:
    """Runs a pass, or replays a recording of it."""

    def __init__(self, work: Pass, networks: Sequence[Policy], recorder: Recorder) -> None:
        """`work` must wait for the device nowhere, and depend on its arguments and the networks' weights alone."""
        self._work = work
        self._networks = networks
        self._recorder = recorder
        self._parameters = [p for network in networks for p in network.parameters()]
        self._factors: torch.Tensor | None = None  # [2] the weight of a value and the KL coefficient, read by replays
        self._met: Counter[object] = Counter()
        self._recordings: dict[object, _Recording] = {}
        self._addresses: list[int] = []
        self._possible = True
        recorder.add(self)

    def forget(self) -> bool:
        """Drop all recordings; whether there were any."""
        had = bool(self._recordings)
        self._recordings.clear()
        return had

    def begin(self, value_weight: float, kl_coef: float) -> None:
        """Before the passes of a minibatch, whose loss has these factors."""
        for network in self._networks:
            network.weights_changed()
        if self._recordings and self._where() != self._addresses:
            log.info("weights or gradients have moved in memory: passes are recorded again")
            self._recordings.clear()
        if self._factors is None:
            self._factors = torch.zeros(2, device=self._parameters[0].device)
        self._factors.copy_(torch.tensor([value_weight, kl_coef]))

    def __call__(self, part: TrainBatch, train_policy: bool) -> PassSums:
        """The sums of a microbatch on the device, after its gradients were added."""
        key = (train_policy, *(f.name for f in fields(part) if getattr(part, f.name) is not None), part.shape_key)
        if key not in self._recordings:
            if not self._possible or self._met[key] < WARM_UPS:
                self._recorder.before_first_pass()
                self._met[key] += 1
                return self._recorder.warm(lambda: self._run(part, train_policy))
            recording = self._record(part, train_policy)
            if recording is None:
                return self._run(part, train_policy)
            if len(self._recordings) == MAX_RECORDINGS:
                oldest = next(iter(self._recordings))
                del self._recordings[oldest], self._met[oldest]
            self._recordings[key] = recording
        self._recordings[key] = self._recordings.pop(key)  # the most recent one is the last
        return self._replay(self._recordings[key], part)

    def _run(self, part: TrainBatch, train_policy: bool) -> PassSums:
        assert self._factors is not None, "begin a minibatch first"
        return self._work(part, train_policy, self._factors[0], self._factors[1])

    def _record(self, part: TrainBatch, train_policy: bool) -> _Recording | None:
        """A recording, or None, from now on for all shapes, where the pass can't be recorded."""
        own = part.map(torch.clone)
        before = self._where()
        try:
            graph, sums = self._recorder.record(lambda: self._run(own, train_policy))
        except RuntimeError as error:
            if is_out_of_memory(error):  # smaller ones may be
                raise
            self._possible = False
            reason = str(error).splitlines()[0]
            log.warning("the update is not recorded as a CUDA graph, and slower with small microbatches: %s", reason)
            return None
        self._addresses = self._where()
        assert self._addresses == before, "a recorded pass must find all gradients that it adds to"
        return _Recording(graph, own, sums)

    def _replay(self, recording: _Recording, part: TrainBatch) -> PassSums:
        for own, given in zip(recording.part.tensors(), part.tensors(), strict=True):
            own.copy_(given)
        with self._recorder.replaying():
            recording.graph.replay()
            return replace(recording.sums, values=recording.sums.values.clone())

    def _where(self) -> list[int]:
        """The addresses of all weights and gradients."""
        gradients = [p.grad for p in self._parameters if p.requires_grad]
        return [p.data_ptr() for p in self._parameters] + [0 if g is None else g.data_ptr() for g in gradients]


def recorded_passes(
    work: Pass,
    networks: Sequence[Policy],
    optim: OptimConfig,
    device: torch.device,
    ranks: Ranks,
    sharding: Sharding,
) -> RecordedPasses | None:
    """Recorded passes, or None where an update runs without: on a CPU, or where `optim.cuda_graphs` is off, or for a
    reason that the log says."""
    if device.type != "cuda" or not optim.cuda_graphs:
        return None
    reasons = {
        "the policy is sharded over ranks": sharding.mode != "none",
        "several ranks sum their gradients": ranks.world_size > 1,
        "the model's passes can't be recorded": not all(network.records_updates for network in networks),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        log.info("the update is not recorded as CUDA graphs: %s", found[0])
        return None
    return RecordedPasses(work, networks, graph_recorder(device))
