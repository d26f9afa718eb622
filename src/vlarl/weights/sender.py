"""The learners' side of a weight sync: from the ranks to all engines, bucket by bucket.

    every rank:  gather a tensor ─┐
    rank 0:      fill a bucket ─► all engines load it, while the next one is filled

An engine that is lost while buckets are sent is reported by name; the ranks still iterate over all tensors, since they
gather them together. Every sync brings all that is trained, so the next one repairs what a failed one left halfway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from vlarl.errors import UsageError
from vlarl.policies.base import Policy
from vlarl.weights.buckets import bucket_message, buckets
from vlarl.weights.stream import WeightStream, weights_to_send

if TYPE_CHECKING:
    from vlarl.weights.vllm_transfer import GpuWeightSender

log = logging.getLogger(__name__)


class EngineLostError(Exception):
    """An engine died, hung or failed in a sync."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(f"{engine} {reason}")
        self.engine = engine


class Ranks(Protocol):
    """What a sender needs of the processes that train together (training/ranks.py)."""

    @property
    def rank(self) -> int:
        """The index of this process."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        ...


class Engines(Protocol):
    """All engines of a run at once, as rank 0 calls them; EngineLostError names one that can't reply."""

    @property
    def num_ranks(self) -> int:
        """Processes of all engines together, where weights go by NCCL."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the connection of NCCL or IPC."""
        ...

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
        """Start a sync (WeightReceiver.start_sync)."""
        ...

    def update_weights(self, message: dict[str, Any]) -> None:
        """Load a message, and wait until it is loaded."""
        ...

    def update_weights_later(self, message: dict[str, Any]) -> None:
        """Load a message while the caller continues; first wait for the one before."""
        ...

    def finish_sync(self, version: int) -> None:
        """Wait for the last message and finish the sync."""
        ...

    def abandon(self, lost: str) -> None:
        """Abandon the sync on all engines but the one that is lost."""
        ...

    @property
    def processes(self) -> Sequence[object]:
        """What a connection is to: others need a new one."""
        ...


@dataclass(frozen=True)
class Transport:
    """How weights travel."""

    backend: Literal["object_store", "nccl", "ipc"]
    dtype: torch.dtype  # of the engines
    bucket_bytes: int
    checksum: bool
    meeting_point: Callable[[], tuple[str, int]]  # address and free port of this machine, for NCCL


class WeightSender:
    """One rank's side of all syncs."""

    def __init__(self, policy: Policy, ranks: Ranks, transport: Transport) -> None:
        if policy.has_adapter and transport.backend != "object_store":  # vLLM's own senders don't know adapters
            raise UsageError(
                f"vllm.sync_backend = {transport.backend!r}: the policy is an adapter, and adapters are sent through "
                "the object store; leave vllm.sync_backend out."
            )
        self.policy = policy
        self._ranks = ranks
        self._transport = transport
        self._gpu: GpuWeightSender | None = None
        self._connected: Sequence[object] = ()  # what the GPU sender is connected to

    def send(self, engines: Engines, version: int) -> str | None:
        """Bring all engines to `version`; rank 0 returns the name of an engine that was lost in the sync."""
        stream, lost = weights_to_send(self.policy, self._transport.dtype), None
        try:
            if self._transport.backend == "object_store":
                self._send_buckets(stream, engines, version)
            else:
                self._gpu_sender(engines).send(stream, version)
        except EngineLostError as error:
            log.warning("%s", error)
            lost = error.engine
            engines.abandon(lost)
        if self._ranks.any(lost is not None):
            self._gpu = None
        return lost

    def _send_buckets(self, stream: WeightStream, engines: Engines, version: int) -> None:
        if self._ranks.rank > 0:
            for _ in stream:
                pass  # gathered together with rank 0
            return
        lost: EngineLostError | None = None
        try:
            engines.start_sync(stream.shapes, version)
        except EngineLostError as error:
            lost = error
        for payload in buckets(stream, self._transport.bucket_bytes):
            if lost is not None:
                continue
            message = bucket_message(payload, self._transport.checksum)
            del payload  # not kept while the next one is filled
            try:
                engines.update_weights_later(message)
            except EngineLostError as error:
                lost = error
            del message
        if lost is not None:
            raise lost
        engines.finish_sync(version)

    def _gpu_sender(self, engines: Engines) -> GpuWeightSender:
        """vLLM's own sender, connected to these engines."""
        from vlarl.weights.vllm_transfer import GpuWeightSender

        if self._gpu is None or self._connected != engines.processes:
            address, port = self._transport.meeting_point()
            assert self._transport.backend != "object_store"
            self._gpu = GpuWeightSender(
                engines,
                self._transport.backend,
                dtype=self._transport.dtype,
                rank=self._ranks.rank,
                bucket_bytes=self._transport.bucket_bytes,
                master_address=address,
                master_port=port,
                num_engine_ranks=engines.num_ranks,
            )
            self._connected = engines.processes
        return self._gpu
