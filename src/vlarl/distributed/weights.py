"""From learner ranks to engines: the weights, bucket by bucket, without passing through the driver.

    every rank:  gather a tensor, fold its adapter ─┐
    rank 0:      fill a bucket ─► object store ─► all engines load it, while the next one is filled

One bucket is filled while the previous one is loaded. Engines check the version before they act again. An engine that
is lost during a sync is reported by name; the ranks still iterate over all tensors, since they gather them together.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray import exceptions
from torch import nn

from vlarl.config.schema import Config
from vlarl.distributed.actor import DIED, Result, Worker, put
from vlarl.errors import UsageError
from vlarl.policies.load import DTYPES
from vlarl.training.ranks import Ranks
from vlarl.weights.stream import ChangedWeights, WeightStream, bucket_message, buckets

if TYPE_CHECKING:
    from vlarl.weights.vllm_transfer import GpuWeightSender

log = logging.getLogger(__name__)

MB = 10**6
LOST = (*DIED, exceptions.GetTimeoutError)


class EngineLostError(Exception):
    """An engine died, hung or failed in a sync."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(f"{engine} {reason}")
        self.engine = engine


@dataclass
class EngineCalls:
    """Calls of all engines at once, made by rank 0."""

    names: list[str]
    actors: list[Any]
    timeout_s: float
    gpus_each: int = 1  # ranks of each engine, where weights go by nccl

    @classmethod
    def to(cls, workers: Sequence[Worker], config: Config) -> EngineCalls:
        """The calls, in a form that can be sent to rank 0."""
        size = config.vllm.tensor_parallel_size
        return cls([w.name for w in workers], [w.actor for w in workers], config.distributed.timeout_s, size)

    def send(self, method: str, *arguments: Any) -> list[Any]:
        """Call all engines, without waiting."""
        return [actor.call.remote(method, *arguments) for actor in self.actors]

    def wait(self, references: Sequence[Any]) -> None:
        """Wait for all of them; EngineLostError names one that can't reply."""
        for name, reference in zip(self.names, references, strict=False):
            try:
                result: Result = ray.get(reference, timeout=self.timeout_s)
            except LOST as error:
                raise EngineLostError(name, f"did not reply in a sync ({type(error).__name__})") from None
            if isinstance(result.error, UsageError):
                raise result.error  # engine and learners don't fit: a new engine would not fit either
            if (reason := result.error or result.defect) is not None:
                raise EngineLostError(name, f"failed in a sync:\n{reason}")

    def call(self, method: str, *arguments: Any) -> None:
        """Call all engines, and wait."""
        self.wait(self.send(method, *arguments))

    def abandon(self, lost: str) -> None:
        """Make all but the lost one abandon the current sync; they act again after one that brings all weights."""
        others = [actor for name, actor in zip(self.names, self.actors, strict=True) if name != lost]
        for reference in [actor.call.remote("abandon_sync") for actor in others]:
            with suppress(*LOST):
                ray.get(reference, timeout=self.timeout_s)

    # The four calls of vLLM's own senders (weights/vllm_transfer.py, SyncClient).

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the connection of all engines, each with ranks of its own."""
        offsets = [1 + index * self.gpus_each for index in range(len(self.actors))]
        infos = [init_info | ({"rank_offset": o} if "rank_offset" in init_info else {}) for o in offsets]
        pairs = zip(self.actors, infos, strict=True)
        self.wait([actor.call.remote("init_weight_transfer_engine", info) for actor, info in pairs])

    def start_sync(self, shapes: dict[str, tuple[int, ...]], version: int) -> None:
        """Start a sync."""
        self.call("start_sync", shapes, version)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Send one message of the sync."""
        self.call("update_weights", update_info)

    def finish_sync(self, version: int) -> None:
        """Finish the sync: the engines act with the new weights."""
        self.call("finish_sync", version)


class WeightSender:
    """One rank's side of all syncs."""

    def __init__(self, policy: nn.Module, ranks: Ranks, config: Config) -> None:
        # Engines start from the same checkpoint as the ranks: they have the frozen weights already.
        self._weights = ChangedWeights(policy, engine_has_base=True)
        self._ranks = ranks
        self._config = config
        self._gpu: GpuWeightSender | None = None
        self._connected: list[Any] = []  # actors that the GPU sender is connected to

    def send(self, engines: EngineCalls, version: int) -> str | None:
        """Bring all engines to `version`; rank 0 returns the name of an engine that was lost in the sync."""
        stream, lost = self._weights.next(), None
        try:
            if self._config.vllm.sync_backend == "object_store":
                self._through_store(stream, engines, version)
            else:
                self._between_gpus(engines).send(stream, version)
        except EngineLostError as error:
            log.warning("%s", error)
            lost = error.engine
            engines.abandon(lost)
        if self._ranks.any(lost is not None):  # all ranks know that the next sync must send everything
            self._gpu = None
            self._weights.forget()
        else:
            self._weights.sent()
        return lost

    def _through_store(self, stream: WeightStream, engines: EngineCalls, version: int) -> None:
        d = self._config.distributed
        if self._ranks.rank > 0:
            for _ in stream:
                pass  # gathered together with rank 0
            return
        lost: EngineLostError | None = None
        loading: list[Any] = []  # calls that load the previous bucket
        try:
            engines.start_sync(dict(stream.shapes), version)
        except EngineLostError as error:
            lost = error
        for payload in buckets(stream, d.sync_bucket_mb * MB, DTYPES[engine_dtype(self._config)]):
            if lost is not None:
                continue
            try:
                message = put(bucket_message(payload, d.sync_checksum))
                del payload  # not kept while the next one is filled
                engines.wait(loading)
                loading = engines.send("update_weights", message)
            except EngineLostError as error:
                lost = error
        if lost is not None:
            raise lost
        engines.wait(loading)
        engines.finish_sync(version)

    def _between_gpus(self, engines: EngineCalls) -> GpuWeightSender:
        """vLLM's own sender, connected to these engines."""
        from vlarl.weights.vllm_transfer import GpuWeightSender

        if self._gpu is None or self._connected != engines.actors:
            backend = self._config.vllm.sync_backend
            assert backend != "object_store"
            address, port = free_address()
            self._gpu = GpuWeightSender(
                engines,
                backend,
                dtype=DTYPES[engine_dtype(self._config)],
                rank=self._ranks.rank,
                bucket_bytes=self._config.distributed.sync_bucket_mb * MB,
                master_address=address,
                master_port=port,
                num_engine_ranks=len(engines.actors) * engines.gpus_each,
            )
            self._connected = engines.actors
        return self._gpu


def engine_dtype(config: Config) -> Literal["float32", "bfloat16"]:
    """The precision of the engines: the same as of the learners' passes."""
    return config.distributed.compute_dtype or config.policy.dtype


def free_address() -> tuple[str, int]:
    """Address of this machine, and a port that is free now."""
    address: str = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind(("", 0))
        return address, int(probe.getsockname()[1])
