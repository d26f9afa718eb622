"""Engines as workers of a cluster, behind the contract of one engine.

    Collector ── generate(rows) ──► EngineGroup ──► engine 0 (the first rows), engine 1 (the next) …
    Rank 0 ── weights, EngineCalls ───────────────► all of them (weights/sender.py)

An engine that is lost is replaced, brought to the learners' weights, and called again: each row has its own seed, so
the result is the same. All rows of a batch are sampled with weights of one version.

Who waits for whom, where the rollout thread decides while the loop's thread publishes weights (learners.py):

    generate                     `lock` while the engines decide, and nothing else
    sync, direct                 `syncing`, then `lock`: nothing is generated from its start to its end
    sync, staged                 `syncing` to its end; `lock` for the commit alone, in which the engines switch
    a lost engine in generate    releases `lock`; then `syncing`, then `lock`: restart, direct sync

`syncing` is always taken before `lock`, so no two threads wait for each other. An engine restarts only while both are
held, and both are kept until it has its weights: no engine is called that has only its base. A thread that has
waited for `syncing` looks first whether the sync that it waited for has replaced its engine already. Rank 0 waits for
engines, the driver for rank 0, and engines wait for none; each of these waits has a time limit. Engines run one call
at a time, so a bucket of a staged sync waits for the batch that its engine is deciding on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from ray import exceptions

from vlarl.config.derive import engine_dtype, engine_memory_fraction
from vlarl.config.schema import Config
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.distributed.actor import DIED, Result, Worker, get_all, put, replace_lost
from vlarl.errors import UsageError, VlarlError, WorkerLostError
from vlarl.policies.load import DTYPES, load_acting_policy
from vlarl.rollout.engines.replica import ReplicaEngine
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.prepare import load_engine_policy
from vlarl.weights.buckets import DamagedBucketError
from vlarl.weights.sender import EngineLostError

log = logging.getLogger(__name__)

LOST = (*DIED, exceptions.GetTimeoutError)
ATTEMPTS = 3  # losses of one engine in a batch that end the run
BUCKET_ATTEMPTS = 3  # to send an engine a bucket that arrives damaged, before the engine counts as lost


def build_torch_engine(config: Config, on_gpu: bool) -> ReplicaEngine:
    """A PyTorch engine; called in the worker's process.

    It starts from `policy.path`, also in a run that is resumed: the first sync brings all that was trained, and the
    checkpoint that the run resumed from may be gone when an engine is replaced.
    """
    device = torch.device("cuda" if on_gpu else "cpu")
    policy = load_engine_policy(config, device)
    return ReplicaEngine(policy, device, config.rollout.batch_size, config.rollout.cuda_graphs)


def build_acting_engine(config: Config, on_gpu: bool) -> TorchEngine:
    """A PyTorch engine that only acts, with the weights of `policy.path`: that of an evaluation in one process."""
    device = torch.device("cuda" if on_gpu else "cpu")
    return TorchEngine(load_acting_policy(config, None, device).eval(), device)


def build_vllm_engine(config: Config, sleeps: bool) -> object:
    """A vLLM engine, likewise; one that `sleeps` can release its GPU's memory."""
    from vlarl.rollout.engines.vllm import VllmEngine

    policy = load_engine_policy(config, torch.device("meta"))
    options = config.vllm.model_copy(update={"gpu_memory_utilization": engine_memory_fraction(config), "sleep": sleeps})
    return VllmEngine(policy, options, DTYPES[engine_dtype(config)])


class EngineGroup:
    """All engines as one. `refresh` brings engines that were replaced to the learners' weights."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self.version = 0
        self.refresh: Callable[[], object] = _no_learners
        self.syncing = threading.RLock()  # held by a sync, and taken before `lock`
        self.lock = threading.RLock()  # held while engines decide, switch their weights or restart

    def generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """Sample a decision for each row, from its own seed whatever else is in the batch; temperature 0 is greedy."""
        losses: Counter[str] = Counter()
        while True:
            with self.lock:
                called = {worker.name: worker.actor for worker in self.workers}
                try:
                    return self._generate(inputs, sampling, seeds)
                except WorkerLostError as error:
                    lost = error
            losses[lost.worker] += 1
            if losses[lost.worker] == ATTEMPTS:
                raise lost
            self.replace_lost(lost, called[lost.worker])

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

    def sleep(self) -> None:
        """Make the engines release their GPUs' memory until the next sync; so does one in place of one that is lost."""
        losses: Counter[str] = Counter()
        with self.syncing, self.lock:
            while True:
                try:
                    get_all([worker.call("sleep") for worker in self.workers])
                    return
                except WorkerLostError as error:
                    losses[error.worker] += 1
                    if losses[error.worker] == ATTEMPTS:
                        raise
                    log.warning("%s It is replaced.", error)
                    self.restart(error.worker)

    def replace_lost(self, error: WorkerLostError, lost: object) -> None:
        """Start another engine in place of the lost actor, and bring all of them to the same weights; where a sync has
        replaced it already, there is nothing to do."""
        with self.syncing, self.lock:
            if any(worker.name == error.worker and worker.actor is lost for worker in self.workers):
                log.warning("%s It is replaced.", error)
                self.restart(error.worker)
                self.refresh()

    def restart(self, name: str) -> None:
        """Start other engines in place of this one and of those that have died with it; they have the weights of the
        checkpoint they start from. Call it with `syncing` and `lock`, and send them weights before you release them."""
        replace_lost(self.workers, name)


def _no_learners() -> None:
    raise VlarlError("there are no learners that could send the engines their weights")


@dataclass
class EngineCalls:
    """Weight syncs of all engines at once, called by rank 0 (`weights.sender.Engines`).

    One bucket is loaded by the engines while rank 0 fills the next. It is put into the object store once, and all
    engines get the same reference: it travels once to each machine, whose engines read one copy. A bucket that arrives
    damaged at an engine is sent to it again: put into the object store a second time, since the copy on the engine's
    machine is the damaged one.
    """

    names: list[str]
    actors: list[Any]
    timeout_s: float
    ranks_each: int = 1  # processes of each engine, where weights go by NCCL
    loading: list[Any] = field(default_factory=list)  # calls that load the previous bucket
    bucket: Any = None  # reference to that bucket
    num_resent: int = 0  # buckets that arrived damaged and were sent again, in all syncs of this object

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

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int, staged: bool = False) -> None:
        """Start a sync."""
        self.loading, self.bucket = [], None
        self.call("start_sync", dict(shapes), version, staged)

    def update_weights(self, message: dict[str, Any]) -> None:
        """Load a message, and wait until it is loaded."""
        self.call("update_weights", message)

    def update_weights_later(self, message: dict[str, Any]) -> None:
        """Load a message, which all engines read from the object store, once the one before is loaded."""
        shared = put(message)
        self.wait_loaded()
        self.bucket, self.loading = shared, self._send("update_weights", shared)

    def finish_sync(self, version: int) -> None:
        """Finish the sync: the engines act with the new weights."""
        self.wait_loaded()
        self.call("finish_sync", version)

    def commit(self, version: int) -> None:
        """Finish a staged sync, from the driver. A loss is raised when all engines have replied: the sync that follows
        must not reach one that is still loading."""
        references = self._send("finish_sync", version)
        ray.wait(references, num_returns=len(references), timeout=self.timeout_s)
        self._wait(references)

    def abandon(self, lost: str) -> None:
        """Make all but the lost one abandon the current sync."""
        others = [actor for name, actor in zip(self.names, self.actors, strict=True) if name != lost]
        if references := [actor.call.remote("abandon_sync") for actor in others]:
            ray.wait(references, num_returns=len(references), timeout=self.timeout_s)  # for all of them together

    def call(self, method: str, *arguments: Any) -> None:
        """Call all engines, and wait."""
        self._wait(self._send(method, *arguments))

    def _send(self, method: str, *arguments: Any) -> list[Any]:
        return [actor.call.remote(method, *arguments) for actor in self.actors]

    def _wait(self, references: Sequence[Any]) -> None:
        for name, reference in zip(self.names, references, strict=False):
            self._check(name, self._result(name, reference))

    def wait_loaded(self) -> None:
        """Wait until all engines have loaded the previous bucket; one where it arrived damaged is sent it again."""
        for index, reference in enumerate(self.loading):
            name, actor = self.names[index], self.actors[index]
            result, attempts = self._result(name, reference), 1
            while isinstance(result.error, DamagedBucketError) and attempts < BUCKET_ATTEMPTS:
                log.warning("%s: %s (attempt %d of %d)", name, result.error, attempts + 1, BUCKET_ATTEMPTS)
                self.num_resent += 1
                attempts += 1
                again = put(ray.get(self.bucket))
                result = self._result(name, actor.call.remote("update_weights", again))
            self._check(name, result)
        self.loading, self.bucket = [], None

    def _result(self, name: str, reference: Any) -> Result:
        try:
            result: Result = ray.get(reference, timeout=self.timeout_s)
        except LOST as error:
            raise EngineLostError(name, f"did not reply in a sync ({type(error).__name__})") from None
        return result

    def _check(self, name: str, result: Result) -> None:
        if isinstance(result.error, UsageError):
            raise result.error  # engine and learners don't fit: a new engine would not fit either
        if (reason := result.error or result.defect) is not None:
            raise EngineLostError(name, f"failed in a sync:\n{reason}")
