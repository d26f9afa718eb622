"""The learners' side of a weight sync: from the ranks to all engines, bucket by bucket.

    every rank:  gather a tensor ─┐
    rank 0:      fill a bucket ─► all engines load it, while the next one is filled

In a staged sync the engines keep the buckets, and the driver makes them load all of them at once (`commit`); otherwise
rank 0 also finishes the sync.

An engine that is lost while buckets are sent is reported by name; the ranks still iterate over all tensors, since they
gather them together. Every sync brings all that is trained, so the next one repairs what a failed one left halfway.

By nccl and ipc a rank can't stop waiting for an engine that is lost, nor for another rank that waits for one. So vLLM's
sender runs in a thread; a rank that gives it up is lost itself, and the learners start again from a checkpoint.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from vlarl.errors import UsageError, WorkerLostError
from vlarl.policies.base import Policy
from vlarl.weights.buckets import bucket_message, buckets, content_bytes
from vlarl.weights.stream import WeightStream, weights_to_send

if TYPE_CHECKING:
    from vlarl.weights.vllm_transfer import GpuWeightSender

log = logging.getLogger(__name__)

POLL_S = 0.1  # how often a rank looks whether its sync by GPU has ended
GRACE_S = 5.0  # for a sync by GPU to end by itself once an engine is lost


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

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int, staged: bool = False) -> None:
        """Start a sync (WeightReceiver.start_sync)."""
        ...

    def update_weights(self, message: dict[str, Any]) -> None:
        """Load a message, and wait until it is loaded."""
        ...

    def update_weights_later(self, message: dict[str, Any]) -> None:
        """Load a message while the caller continues; first wait for the one before."""
        ...

    def wait_loaded(self) -> None:
        """Wait for the last message."""
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
    timeout_s: float  # of a sync by nccl or ipc


class WatchedEngines:
    """The calls that vLLM's sender makes; it remembers an engine that was lost while the sender waits inside NCCL."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.lost: EngineLostError | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the connection."""
        with self._watched():
            self._engines.init_weight_transfer_engine(init_info)

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
        """Start a sync."""
        with self._watched():
            self._engines.start_sync(shapes, version)

    def update_weights(self, message: dict[str, Any]) -> None:
        """Load a message."""
        with self._watched():
            self._engines.update_weights(message)

    def finish_sync(self, version: int) -> None:
        """Finish the sync."""
        with self._watched():
            self._engines.finish_sync(version)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except EngineLostError as error:
            self.lost = error
            raise


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
        self._watched: WatchedEngines | None = None  # the engines as it calls them
        self.num_bytes = 0  # of the weights that the last sync sent to one engine

    def send(self, engines: Engines, version: int, staged: bool = False) -> str | None:
        """Bring all engines to `version`; rank 0 returns the name of an engine that was lost in the sync.

        In a staged sync they keep its weights until they are told to commit them.
        """
        stream, lost = weights_to_send(self.policy, self._transport.dtype), None
        self.num_bytes = 0
        try:
            if self._transport.backend == "object_store":
                self._send_buckets(stream, engines, version, staged)
            else:
                assert not staged, "vLLM's own senders load what they send"
                self._send_by_gpu(stream, engines, version)
        except EngineLostError as error:
            log.warning("%s", error)
            lost = error.engine
            engines.abandon(lost)
        if self._ranks.any(lost is not None):
            self._gpu = None
        return lost

    def _send_buckets(self, stream: WeightStream, engines: Engines, version: int, staged: bool) -> None:
        if self._ranks.rank > 0:
            for _ in stream:
                pass  # gathered together with rank 0
            return
        lost: EngineLostError | None = None
        try:
            engines.start_sync(stream.shapes, version, staged)
        except EngineLostError as error:
            lost = error
        for payload in buckets(stream, self._transport.bucket_bytes):
            if lost is not None:
                continue
            message, num_bytes = bucket_message(payload, self._transport.checksum), content_bytes(payload)
            del payload  # not kept while the next one is filled
            try:
                engines.update_weights_later(message)
                self.num_bytes += num_bytes
            except EngineLostError as error:
                lost = error
            del message
        if lost is not None:
            raise lost
        engines.wait_loaded()
        if not staged:
            engines.finish_sync(version)

    def _send_by_gpu(self, stream: WeightStream, engines: Engines, version: int) -> None:
        """Send by nccl or ipc; WorkerLostError where that does not end in time, or an engine is lost in the middle."""
        sent: Future[None] = Future()

        @torch.no_grad()
        def send() -> None:
            try:
                self._gpu_sender(engines).send(stream, version)
            except Exception as error:  # noqa: BLE001 - of a thread: raised where its result is read
                sent.set_exception(error)
            else:
                sent.set_result(None)

        if self._watched is not None:
            self._watched.lost = None
        threading.Thread(target=send, name="weight sync", daemon=True).start()
        end = time.monotonic() + self._transport.timeout_s
        while not wait([sent], timeout=POLL_S).done:
            lost = None if self._watched is None else self._watched.lost
            end = end if lost is None else min(end, time.monotonic() + GRACE_S)
            if time.monotonic() > end:
                learner = f"learner {self._ranks.rank}"
                reason = f"{lost}" if lost is not None else f"it has not ended within {self._transport.timeout_s:g} s"
                raise WorkerLostError(
                    f"{learner} can't finish the weight sync to version {version} by {self._transport.backend}: "
                    f"{reason}. It still waits on its GPU, which only ends with its process.",
                    learner,
                )
        sent.result()
        self.num_bytes = sum(map(math.prod, stream.shapes.values())) * self._transport.dtype.itemsize

    def _gpu_sender(self, engines: Engines) -> GpuWeightSender:
        """vLLM's own sender, connected to these engines."""
        from vlarl.weights.vllm_transfer import GpuWeightSender

        if self._gpu is None or self._connected != engines.processes:
            address, port = self._transport.meeting_point()
            assert self._transport.backend != "object_store"
            self._watched = WatchedEngines(engines)
            self._gpu = GpuWeightSender(
                self._watched,
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
