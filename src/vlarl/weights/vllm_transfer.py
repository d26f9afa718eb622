"""How weights reach a running vLLM engine, through the library's weight-transfer API.

    bytes   buckets of safetensors, as arguments of a call (a pipe, Ray's object store): for CPUs and tests
    nccl    broadcast between GPUs          } vLLM's own backends: the learner's side is `GpuWeightSender`, which
    ipc     handles to memory of one GPU    } drives the engine through the four calls of `SyncClient`

With bytes the learner waits for each bucket to be loaded; with nccl the engine's `update_weights` and the learner's
broadcast run at the same time, each waiting for the other inside NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from vlarl.weights.buckets import unpacked
from vlarl.weights.nccl_library import require_nccl
from vlarl.weights.stream import WeightStream


@dataclass
class BytesInit(WeightTransferInitInfo):  # type: ignore[misc]
    """There is nothing to negotiate."""


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Some of the weights."""

    payload: bytes  # safetensors


class BytesWeightTransferEngine(WeightTransferEngine[BytesInit, Bucket]):  # type: ignore[misc]
    """The engine's side: weights arrive as bytes, one bucket at a time."""

    init_info_cls = BytesInit
    update_info_cls = Bucket

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open = False

    def init_transfer_engine(self, init_info: BytesInit) -> None:
        """There is no connection to open."""

    def start_weight_update(self) -> None:
        """Prepare layers to be loaded again; one that receives nothing keeps its weights."""
        if self._open:  # the last sync failed halfway: its weights would be counted as part of this one
            self.finish_weight_update()
        initialize_layerwise_reload(self.model)
        self._open = True

    def receive_weights(self, update_info: Bucket) -> None:
        """Load one bucket."""
        # Copied one at a time: vLLM keeps tensors of incomplete layers, and a view would keep its bucket alive.
        self.model.load_weights((name, view.clone()) for name, view in unpacked(update_info.payload).items())

    def finish_weight_update(self) -> None:
        """Finish loading the layers."""
        finalize_layerwise_reload(self.model, self.model_config)
        _refresh_tied_heads(self.model)
        self._open = False

    def shutdown(self) -> None:
        """There is nothing to release."""


def _refresh_tied_heads(model: torch.nn.Module) -> None:
    """Bring an output layer up to date that shares the weight of the embedding: nothing is loaded into it, and on a CPU
    it computes with a packed copy of its own."""
    embeddings = {id(layer.weight) for layer in model.modules() if type(layer) is VocabParallelEmbedding}
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings:
            layer.quant_method.process_weights_after_loading(layer)


class SyncClient(Protocol):
    """What a learner calls on an engine, directly or through an actor handle; `VllmEngine` has these methods."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...  # noqa: D102
    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None: ...  # noqa: D102
    def update_weights(self, message: dict[str, Any]) -> None: ...  # noqa: D102
    def finish_sync(self, version: int) -> None: ...  # noqa: D102


class _StreamSource(WeightSource):  # type: ignore[misc]
    """A stream in the form that vLLM's trainer side iterates over."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.stream = WeightStream({}, lambda name: torch.empty(0))

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self.dtype, shape) for name, shape in self.stream.shapes.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.to(self.dtype)) for name, tensor in self.stream)


class _Client:
    """The four calls that vLLM's trainer side makes, with the shapes and version that vlarl's engine needs."""

    def __init__(self, engine: SyncClient, source: _StreamSource) -> None:
        self.engine = engine
        self.source = source
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.engine.start_sync(dict(self.source.stream.shapes), self.version)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version  # vLLM's trainer side does not set it
        self.engine.finish_sync(self.version)


class GpuWeightSender:
    """The learner's side of nccl and ipc; created and used on every rank, rank 0 sends."""

    def __init__(
        self,
        engine: SyncClient,
        backend: Literal["nccl", "ipc"],
        *,
        dtype: torch.dtype,
        rank: int,
        bucket_bytes: int,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        num_engine_ranks: int = 1,
    ) -> None:
        """`dtype` is the engine's; address and port are where nccl's ranks meet, ipc needs neither."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        init: Any = (
            IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=bucket_bytes, rank=rank)
            if backend == "ipc"
            else NCCLTrainerInitInfo(
                master_address,
                master_port,
                1 + num_engine_ranks,
                packed_buffer_size_bytes=bucket_bytes,
                rank=rank,
            )
        )
        if backend == "nccl" and rank == 0:
            require_nccl()
        self._source = _StreamSource(dtype)
        self._client = _Client(engine, self._source)
        self._trainer = WeightTransferTrainerFactory.trainer_init(init, client=self._client, source=self._source)

    def send(self, weights: WeightStream, version: int) -> None:
        """Bring the engine to `version`."""
        self._source.stream, self._client.version = weights, version
        if torch.cuda.is_available():  # by nccl vLLM packs on streams of its own, which don't wait for the optimizer's
            torch.cuda.synchronize()
        self._trainer.send_weights()

    def close(self) -> None:
        """Leave the process group."""
        self._trainer.shutdown()
