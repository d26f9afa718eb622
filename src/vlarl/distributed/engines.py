"""Engines as workers of a cluster, behind the contract of one engine.

    Collector ── generate(rows) ──► EngineGroup ──► engine 0 (the first rows), engine 1 (the next) …
    LearnerGroup ── weights ──────────────────────► all of them, by `Rank.send_weights`

A generation and a sync never overlap: the second one waits. An engine that is lost is replaced, brought to the
learners' weights, and called again: each row has its own seed, so the result is the same.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from vlarl.config.derive import engine_memory_fraction
from vlarl.config.schema import Config
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.distributed.actor import Worker, get_all
from vlarl.distributed.weights import engine_dtype
from vlarl.errors import VlarlError, WorkerLostError
from vlarl.policies.load import load_acting_policy
from vlarl.rollout.engines.replica import ReplicaEngine

log = logging.getLogger(__name__)

ATTEMPTS = 3  # losses of one engine in a batch that end the run


def build_torch_engine(config: Config, checkpoint: Path | None, on_gpu: bool) -> ReplicaEngine:
    """A PyTorch engine; called in the worker's process."""
    device = torch.device("cuda" if on_gpu else "cpu")
    settings = config.policy.model_copy(update={"dtype": engine_dtype(config)})
    policy = load_acting_policy(config.model_copy(update={"policy": settings}), checkpoint, device)
    return ReplicaEngine(policy, device, config.rollout.batch_size, config.rollout.cuda_graphs)


def build_vllm_engine(config: Config, checkpoint: Path | None) -> object:
    """A vLLM engine; called in the worker's process."""
    from vlarl.policies.fresh import FRESH, fresh_checkpoint
    from vlarl.rollout.engines.vllm import VllmEngine, VllmOptions

    settings, vllm = config.policy, config.vllm
    path: str | Path = checkpoint or settings.path
    if str(path) in FRESH:
        path = fresh_checkpoint(str(path), settings.chunk_length, settings.num_images, settings.use_proprio)
    options = VllmOptions(
        model_class=vllm.model_class,
        dtype=engine_dtype(config),
        enforce_eager=vllm.enforce_eager,
        gpu_memory_utilization=engine_memory_fraction(config),
        tensor_parallel_size=vllm.tensor_parallel_size,
        max_num_seqs=vllm.max_num_seqs,
        max_model_len=vllm.max_model_len,
        prefix_caching=vllm.prefix_caching,
        sync_backend="bytes" if vllm.sync_backend == "object_store" else vllm.sync_backend,
    )
    return VllmEngine(
        path, options, num_images=settings.num_images, use_proprio=settings.use_proprio, base=settings.base
    )


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

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Weights come from learners on the cluster, by `LearnerGroup.publish`."""
        raise NotImplementedError("engines of a cluster take weights from its learners: use LearnerGroup.publish")


def _no_learners() -> None:
    raise VlarlError("there are no learners that could send the engines their weights")
