"""Engines as workers of a cluster, behind the contract of one engine.

    Collector ── generate(rows) ──► EngineGroup ──► engine 0 (the first rows), engine 1 (the next) …
    Rank 0 ── weights, EngineCalls ───────────────► all of them (weights/sender.py)

A generation and a sync never overlap: the second one waits. An engine that is lost is replaced, brought to the
learners' weights, and called again: each row has its own seed, so the result is the same.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from ray import exceptions

from vlarl.config.derive import engine_dtype, engine_memory_fraction
from vlarl.config.schema import Config
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.distributed.actor import DIED, Result, Worker, get_all, put
from vlarl.errors import UsageError, VlarlError, WorkerLostError
from vlarl.policies.load import DTYPES
from vlarl.rollout.engines.replica import ReplicaEngine
from vlarl.training.prepare import load_engine_policy
from vlarl.weights.sender import EngineLostError

log = logging.getLogger(__name__)

LOST = (*DIED, exceptions.GetTimeoutError)
ATTEMPTS = 3  # losses of one engine in a batch that end the run


def build_torch_engine(config: Config, on_gpu: bool) -> ReplicaEngine:
    """A PyTorch engine; called in the worker's process.

    It starts from `policy.path`, also in a run that is resumed: the first sync brings all that was trained, and the
    checkpoint that the run resumed from may be gone when an engine is replaced.
    """
    device = torch.device("cuda" if on_gpu else "cpu")
    policy = load_engine_policy(config, device)
    return ReplicaEngine(policy, device, config.rollout.batch_size, config.rollout.cuda_graphs)


def build_vllm_engine(config: Config) -> object:
    """A vLLM engine, likewise."""
    from vlarl.rollout.engines.vllm import VllmEngine

    policy = load_engine_policy(config, torch.device("meta"))
    options = config.vllm.model_copy(update={"gpu_memory_utilization": engine_memory_fraction(config)})
    return VllmEngine(policy, options, DTYPES[engine_dtype(config)])


class EngineGroup:
    """All engines as one. `refresh` brings engines that were replaced to the learners' weights."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self.version = 0
        self.refresh: Callable[[], None] = _no_learners
        self.lock = threading.RLock()

    def generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """Sample a decision for each row, from its own seed whatever else is in the batch; temperature 0 is greedy."""
        with self.lock:
            losses: Counter[str] = Counter()
            while True:
                try:
                    return self._generate(inputs, sampling, seeds)
                except WorkerLostError as error:
                    losses[error.worker] += 1
                    if losses[error.worker] == ATTEMPTS:
                        raise
                    self.replace_lost(error)

    def _generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        rows = [split for split in np.array_split(np.arange(len(seeds)), len(self.workers)) if len(split)]
        slices = [slice(int(split[0]), int(split[-1]) + 1) for split in rows]
        parts: list[Decisions] = get_all(
            [
                worker.call("generate", inputs.rows(own), sampling, list(seeds[own]))
                for worker, own in zip(self.workers, slices, strict=False)
            ]
        )
        for worker, part in zip(self.workers, parts, strict=False):
            if bool((part.version != self.version).any()):
                version = int(part.version[0])
                raise VlarlError(f"{worker.name} sampled with weights of version {version}, not {self.version}")
        return Decisions.cat(parts)

    def replace_lost(self, error: WorkerLostError) -> None:
        """Start another engine in place of the one that was lost, and bring all of them to the same weights."""
        log.warning("%s It is replaced.", error)
        self.restart(error.worker)
        self.refresh()

    def restart(self, name: str) -> None:
        """Start another engine in place of this one; it has the weights of the checkpoint it starts from."""
        worker = next(worker for worker in self.workers if worker.name == name)
        worker.replace()


def _no_learners() -> None:
    raise VlarlError("there are no learners that could send the engines their weights")


@dataclass
class EngineCalls:
    """Weight syncs of all engines at once, called by rank 0 (`weights.sender.Engines`).

    One bucket is loaded by the engines while rank 0 fills the next.
    """

    names: list[str]
    actors: list[Any]
    timeout_s: float
    ranks_each: int = 1  # processes of each engine, where weights go by NCCL
    loading: list[Any] = field(default_factory=list)  # calls that load the previous bucket

    @classmethod
    def to(cls, workers: Sequence[Worker], config: Config) -> EngineCalls:
        """The calls, in a form that can be sent to rank 0."""
        size = config.vllm.tensor_parallel_size
        return cls([w.name for w in workers], [w.actor for w in workers], config.distributed.timeout_s, size)

    @property
    def num_ranks(self) -> int:
        """Processes of all engines together."""
        return len(self.actors) * self.ranks_each

    @property
    def processes(self) -> Sequence[object]:
        """What a connection is to."""
        return self.actors

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the connection of all engines, each with ranks of its own."""
        offsets = [1 + index * self.ranks_each for index in range(len(self.actors))]
        infos = [init_info | ({"rank_offset": o} if "rank_offset" in init_info else {}) for o in offsets]
        pairs = zip(self.actors, infos, strict=True)
        self._wait([actor.call.remote("init_weight_transfer_engine", info) for actor, info in pairs])

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
        """Start a sync."""
        self.loading = []
        self.call("start_sync", dict(shapes), version)

    def update_weights(self, message: dict[str, Any]) -> None:
        """Load a message, and wait until it is loaded."""
        self.call("update_weights", message)

    def update_weights_later(self, message: dict[str, Any]) -> None:
        """Load a message, which all engines read from the object store, once the one before is loaded."""
        shared = put(message)
        self._wait(self.loading)
        self.loading = self._send("update_weights", shared)

    def finish_sync(self, version: int) -> None:
        """Finish the sync: the engines act with the new weights."""
        self._wait(self.loading)
        self.call("finish_sync", version)

    def abandon(self, lost: str) -> None:
        """Make all but the lost one abandon the current sync."""
        others = [actor for name, actor in zip(self.names, self.actors, strict=True) if name != lost]
        for reference in [actor.call.remote("abandon_sync") for actor in others]:
            with suppress(*LOST):
                ray.get(reference, timeout=self.timeout_s)

    def call(self, method: str, *arguments: Any) -> None:
        """Call all engines, and wait."""
        self._wait(self._send(method, *arguments))

    def _send(self, method: str, *arguments: Any) -> list[Any]:
        return [actor.call.remote(method, *arguments) for actor in self.actors]

    def _wait(self, references: Sequence[Any]) -> None:
        for name, reference in zip(self.names, references, strict=False):
            try:
                result: Result = ray.get(reference, timeout=self.timeout_s)
            except LOST as error:
                raise EngineLostError(name, f"did not reply in a sync ({type(error).__name__})") from None
            if isinstance(result.error, UsageError):
                raise result.error  # engine and learners don't fit: a new engine would not fit either
            if (reason := result.error or result.defect) is not None:
                raise EngineLostError(name, f"failed in a sync:\n{reason}")
