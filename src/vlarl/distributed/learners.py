"""Learners as workers of a cluster: an actor for each rank, behind the interface of one learner.

    LearnerGroup ── annotate(batch), update(batch), save(…) ──► Rank 0, Rank 1 …   all of them, in the same order
                 ◄── rank 0's result ────────────────────
    Rank 0 ── weights, bucket by bucket ──► engines         the others take part where weights are gathered

Ranks wait for each other inside every call (training/ranks.py), so a call goes to all of them or to none. Several
threads may call: a lock keeps the order. The batch is put into the object store once, where all ranks of a machine
read it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch

from vlarl.algorithms import build_algorithm
from vlarl.config.derive import engine_dtype
from vlarl.config.schema import Config
from vlarl.data.imitation import build_ptx
from vlarl.decisions import TensorRows, TrainBatch
from vlarl.distributed.actor import Worker, get_all, put
from vlarl.distributed.address import free_address
from vlarl.distributed.engines import EngineCalls, EngineGroup
from vlarl.errors import ClusterError
from vlarl.policies.base import Policy
from vlarl.policies.load import DTYPES
from vlarl.training.annotate import Annotations
from vlarl.training.checkpoint import CheckpointStore, policy_folder
from vlarl.training.fsdp import Sharding
from vlarl.training.learner import Learner
from vlarl.training.prepare import load_trained_policy
from vlarl.training.ranks import ProcessGroup, Ranks, SingleRank
from vlarl.training.state import TrainerState
from vlarl.types import UpdateResult
from vlarl.weights.sender import Transport, WeightSender

log = logging.getLogger(__name__)

MB = 10**6
ENGINE_ATTEMPTS = 3  # to send an engine the learners' weights, replacing it after each failure


def transport_of(config: Config) -> Transport:
    """How weights travel to the engines, as configured."""
    return Transport(
        backend=config.vllm.sync_backend,
        dtype=DTYPES[engine_dtype(config)],
        bucket_bytes=config.distributed.sync_bucket_mb * MB,
        checksum=config.distributed.sync_checksum,
        meeting_point=free_address,
    )


@dataclass(frozen=True)
class Updated:
    """The result of an update, and the learner's state after it."""

    result: UpdateResult
    version: int
    kl_coef: float


class Rank:
    """One of the learner processes; built and called in the worker's process."""

    def __init__(self, config: Config, world_size: int, on_gpu: bool, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cuda:0" if on_gpu else "cpu")  # the first that Ray makes visible to this process
        self._inputs: TensorRows | None = None  # of the batch that was annotated last

    def meeting_point(self) -> tuple[str, int]:
        """Address and free port of this machine, where the process group's ranks meet."""
        return free_address()

    def join(self, address: str, port: int, checkpoint: Path | None) -> None:
        """Join the other ranks and build the learner."""
        d = self.config.distributed
        ranks: Ranks = SingleRank()
        if self.world_size > 1 or d.sharding != "none":
            deadline = timedelta(seconds=d.timeout_s)
            ranks = ProcessGroup.join(self.rank, self.world_size, address, port, self.device, deadline)
        torch.manual_seed(self.config.run.seed)
        sharding = Sharding(d.sharding, d.shard_group_size, d.cpu_offload, d.compute_dtype and DTYPES[d.compute_dtype])
        device = self.device if sharding.mode == "none" else torch.device("cpu")
        policy = load_trained_policy(self.config, policy_folder(checkpoint) if checkpoint else None, device)
        algorithm = build_algorithm(self.config.algorithm, self.config.rollout.temperature, self.config.kl)
        ptx = build_ptx(self.config, policy, ranks)
        self.learner = Learner(policy, algorithm, self.config, self.device, ranks, sharding, ptx)
        self.sender = WeightSender(policy, ranks, transport_of(self.config))

    def open_store(self, folder: Path) -> None:
        """Keep checkpoints in this folder."""
        kept = self.config.checkpoint
        self.store = CheckpointStore(folder, kept.keep, self.learner.ranks, max_total_gib=kept.max_total_gib)

    def restore(self, checkpoint: Path) -> tuple[TrainerState, int, float]:
        """Resume from a checkpoint; returns the counters, the version and the KL coefficient."""
        return self.store.restore(self.learner, checkpoint), self.learner.version, self.learner.kl_coef

    def save(self, name: str, state: TrainerState) -> Path:
        """Write a checkpoint."""
        return self.store.save(name, self.learner, state)

    def save_policy(self, name: str, metadata: dict[str, Any]) -> Path:
        """Write the policy alone."""
        return self.store.save_policy(name, self.learner.policy, metadata)

    def annotate(self, batch: TrainBatch, iteration: int, last: TensorRows | None) -> Annotations | None:
        """Log-probs and values of a batch, from rank 0. The batch's inputs are kept for its update."""
        self._inputs = batch.inputs
        found = self.learner.annotate(batch, iteration, last)
        return found if self.rank == 0 else None

    def updating(
        self, batch: TrainBatch, iteration: int, iterations: int | None
    ) -> Iterator[tuple[int, int] | Updated]:
        """Train on a batch: the progress after each optimizer step, and finally the result."""
        result = yield from self.learner.updating(self._with_inputs(batch), iteration, iterations)
        yield Updated(result, self.learner.version, self.learner.kl_coef)

    def update(self, batch: TrainBatch, iteration: int, iterations: int | None) -> None:
        """The same on the other ranks, which report no progress."""
        self.learner.update(self._with_inputs(batch), iteration, lambda done, total: None, iterations)

    def _with_inputs(self, batch: TrainBatch) -> TrainBatch:
        inputs, self._inputs = self._inputs, None
        if len(batch.inputs) or inputs is None:
            return batch
        return replace(batch, inputs=inputs)

    def use_average(self, wanted: bool) -> None:
        """Swap the averages in for the weights, or the weights back."""
        assert self.learner.average is not None
        if wanted:
            self._averaged = self.learner.average.in_place()
            self._averaged.__enter__()
        else:
            self._averaged.__exit__(None, None, None)

    def send_weights(self, engines: EngineCalls) -> tuple[int, str | None]:
        """Bring all engines to this learner's version; returns the version, and an engine that was lost."""
        return self.learner.version, self.sender.send(engines, self.learner.version)


class LearnerGroup:
    """All ranks as one learner. `policy` reads observations; it has no weights."""

    def __init__(self, workers: Sequence[Worker], config: Config, policy: Policy) -> None:
        self.workers = list(workers)
        self.config = config
        self.policy = policy
        self.version = 0
        self.kl_coef = config.kl.coef
        self.average = None if config.ema.beta is None else RankAverages(self)
        self._lock = threading.Lock()
        self._annotated: TensorRows | None = None  # inputs that the ranks have kept for the update

    def join(self, checkpoint: Path | None) -> None:
        """Make the ranks join at rank 0's address and build their learners."""
        first = self.workers[0]
        address, port = first.get(first.call("meeting_point"))
        self.call_all("join", address, port, checkpoint, timeout_s=self.config.distributed.start_timeout_s)

    def call_all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method on all ranks; rank 0's result. What fails on one of them fails here at once."""
        with self._lock:
            requests = [worker.call(method, *arguments, timeout_s=timeout_s) for worker in self.workers]
        return get_all(requests)[0]

    def update(
        self, batch: TrainBatch, iteration: int, on_step: Callable[[int, int], None], iterations: int | None = None
    ) -> UpdateResult:
        """Train on a batch of decisions; `on_step` is called with the optimizer steps done and their total."""
        first, *others = self.workers
        with self._lock:
            shared = put(self._without_inputs(batch))
            steps = first.stream("updating", shared, iteration, iterations)
            waiting = {(q := worker.call("update", shared, iteration, iterations)).reference: q for worker in others}
        updated: Updated | None = None
        while updated is None:
            ready, _ = ray.wait([steps, *waiting], num_returns=1, timeout=first.timeout_s)
            if not ready:
                raise first.lost(f"has made no optimizer step for {first.timeout_s:g} s: it hangs")
            for reference in ready:
                if reference is steps:
                    step = first.next(steps, "updating")
                    if isinstance(step, Updated):
                        updated = step
                    else:
                        on_step(*step)
                else:
                    request = waiting.pop(reference)
                    request.worker.get(request)
        for request in waiting.values():
            request.deadline = time.monotonic() + first.timeout_s
        get_all(list(waiting.values()))
        self.version, self.kl_coef = updated.version, updated.kl_coef
        return updated.result

    def annotate(self, batch: TrainBatch, iteration: int, last: TensorRows | None = None) -> Annotations:
        """Log-probs and values of a batch before its first step; `last` are the inputs of last observations."""
        self._annotated = batch.inputs
        found: Annotations = self.call_all("annotate", put(batch), iteration, None if last is None else put(last))
        return found

    def _without_inputs(self, batch: TrainBatch) -> TrainBatch:
        """The batch as it is sent to the ranks: inputs that they have kept are left out."""
        kept, self._annotated = self._annotated, None
        return replace(batch, inputs=batch.inputs.empty()) if batch.inputs is kept else batch

    def send_weights(self, engine: EngineGroup) -> None:
        """Bring the engines to the current weights; one that is lost in the sync is replaced."""
        with engine.lock:
            losses: Counter[str] = Counter()
            while True:
                calls = EngineCalls.to(engine.workers, self.config)
                # Rank 0 gives an engine the whole limit for each of its calls, so its own limit is larger.
                # In an asynchronous run the ranks may have finished an update that the driver does not know of yet.
                version, lost = self.call_all("send_weights", calls, timeout_s=4 * calls.timeout_s)
                if lost is None:
                    engine.version = version
                    return
                losses[lost] += 1
                if losses[lost] == ENGINE_ATTEMPTS:
                    raise ClusterError(
                        f"{lost} could not be brought to the learners' weights, {ENGINE_ATTEMPTS} times over; "
                        f"{self.workers[0].log_file} says why."
                    )
                log.warning("%s was lost in a sync. It is replaced.", lost)
                engine.restart(lost)


class RankAverages:
    """The averages of the weights, on all ranks."""

    def __init__(self, group: LearnerGroup) -> None:
        self._group = group

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the ranks' weights are the averages."""
        self._group.call_all("use_average", True)
        try:
            yield
        finally:
            self._group.call_all("use_average", False)


class RankStore:
    """The checkpoints of a run, which the ranks write and read together."""

    def __init__(self, group: LearnerGroup, folder: Path) -> None:
        self._group = group
        group.call_all("open_store", folder.absolute())

    def save(self, name: str, learner: Any, state: TrainerState) -> Path:
        """Write a checkpoint that training can resume from."""
        path: Path = self._group.call_all("save", name, state)
        return path

    def save_policy(self, name: str, policy: Policy, metadata: dict[str, Any]) -> Path:
        """Write the policy alone, with its metadata."""
        path: Path = self._group.call_all("save_policy", name, metadata)
        return path

    def restore(self, learner: Any, checkpoint: Path) -> TrainerState:
        """Bring all ranks to the state of the checkpoint."""
        state, self._group.version, self._group.kl_coef = self._group.call_all("restore", checkpoint.absolute())
        restored: TrainerState = state
        return restored
