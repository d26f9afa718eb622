"""Learners as workers of a cluster: an actor for each rank, behind the interface of one learner.

    LearnerGroup ── annotate(batch), update(batch), save(…) ──► Rank 0, Rank 1 …   all of them, in the same order
                 ◄── rank 0's result ────────────────────
    Rank 0 ── weights, bucket by bucket ──► engines         the others take part where weights are gathered

How ranks are called together is rank_group.py's. The batch is put into the object store once, where all ranks of a
machine read it; of its inputs it has the names, and each rank fetches those of its own microbatches (stored_rows.py).

Weights go to the engines directly, while nothing is generated, or staged: the engines decide until they switch to the
new weights (`staged_syncs`). engines.py says which locks a sync takes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import torch

from vlarl.algorithms import build_algorithm
from vlarl.config.derive import engine_dtype, staged_syncs
from vlarl.config.schema import Config
from vlarl.data.imitation import build_ptx
from vlarl.decisions import TensorRows, TrainBatch
from vlarl.distributed.actor import Worker, get_all, put
from vlarl.distributed.address import free_address
from vlarl.distributed.engines import EngineCalls, EngineGroup
from vlarl.distributed.kept_rows import kept_rows, memory_limit
from vlarl.distributed.rank_group import RankGroup, RankProcess
from vlarl.errors import ClusterError
from vlarl.policies.base import Policy
from vlarl.policies.load import DTYPES
from vlarl.recording import release_recordings
from vlarl.training.annotate import Annotations
from vlarl.training.checkpoint import CheckpointStore, policy_folder
from vlarl.training.learner import Learner
from vlarl.training.prepare import load_trained_policy
from vlarl.training.state import TrainerState
from vlarl.types import UpdateResult
from vlarl.weights.sender import EngineLostError, Transport, WeightSender
from vlarl.weights.sync import SyncCost

log = logging.getLogger(__name__)

MB = 10**6
SYNC_LIMITS = 4  # times distributed.timeout_s: rank 0 gives an engine the whole limit for each of its calls in a sync
ENGINE_ATTEMPTS = 3  # to send an engine the learners' weights, replacing it after each failure


def transport_of(config: Config) -> Transport:
    """How weights travel to the engines, as configured."""
    return Transport(
        backend=config.vllm.sync_backend,
        dtype=DTYPES[engine_dtype(config)],
        bucket_bytes=config.distributed.sync_bucket_mb * MB,
        checksum=config.distributed.sync_checksum,
        meeting_point=free_address,
        timeout_s=config.distributed.timeout_s,
    )


@dataclass(frozen=True)
class Annotated(TensorRows):
    """Stands for the inputs of the batch that was annotated last: the ranks have them."""


@dataclass(frozen=True)
class Updated:
    """The result of an update, and the learner's state after it."""

    result: UpdateResult
    version: int
    kl_coef: float


@dataclass(frozen=True)
class Sent:
    """The result of one attempt to bring all engines to the ranks' weights."""

    version: int
    lost: str | None  # an engine that was lost: the others have abandoned the sync
    num_bytes: int  # of the weights that were sent to one engine
    num_resent: int  # buckets that arrived damaged


@dataclass
class _Sync:
    """What a sync has taken so far, over all attempts."""

    began: float = field(default_factory=time.monotonic)
    commit_s: float = 0.0
    num_bytes: int = 0
    num_resent: int = 0
    losses: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def excluding(self, engine: EngineGroup) -> Iterator[None]:
        """In the block no engine decides; its seconds are counted."""
        with engine.lock:
            began = time.monotonic()
            yield
            self.commit_s += time.monotonic() - began

    def cost(self) -> SyncCost:
        return SyncCost(time.monotonic() - self.began, self.commit_s, self.num_bytes, self.num_resent)


class Rank(RankProcess):
    """One of the learner processes; built and called in the worker's process."""

    def __init__(self, config: Config, world_size: int, on_gpu: bool, rank: int) -> None:
        super().__init__(config.distributed, world_size, on_gpu, rank)
        self.config = config
        self.annotated: TensorRows | None = None  # inputs of a batch that is updated on next

    def join(self, address: str, port: int, checkpoint: Path | None) -> None:
        """Join the other ranks and build the learner."""
        limit_s = SYNC_LIMITS * self.config.distributed.timeout_s  # of ranks that wait for rank 0 in a sync, too
        ranks, sharding = self.join_others(address, port, limit_s), self.sharding
        torch.manual_seed(self.config.run.seed)
        sharded = sharding.mode != "none"
        device = torch.device("cpu") if sharded else self.device
        folder = policy_folder(checkpoint) if checkpoint else None
        policy = load_trained_policy(self.config, folder, device, deferred=sharded)
        algorithm = build_algorithm(self.config.algorithm, self.config.rollout.temperature, self.config.kl)
        ptx = build_ptx(self.config, policy, ranks)
        self.learner = Learner(policy, algorithm, self.config, self.device, ranks, sharding, ptx)
        self.sender = WeightSender(policy, ranks, transport_of(self.config))
        self.release_cached_memory()

    def release_cached_memory(self) -> None:
        """Give memory that PyTorch caches back to the GPU, for an engine that starts or wakes there."""
        if self.device.type == "cuda":
            release_recordings(self.device)  # they are made again by the next update
            torch.cuda.empty_cache()

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
        """Log-probs and values of a batch, from rank 0."""
        batch = self._keeping(batch, iteration)
        self.annotated = batch.inputs
        found = self.learner.annotate(batch, iteration, last)
        return found if self.rank == 0 else None

    def updating(
        self, batch: TrainBatch, iteration: int, iterations: int | None
    ) -> Iterator[tuple[int, int] | Updated]:
        """Train on a batch: the progress after each optimizer step, and finally the result."""
        result = yield from self.learner.updating(self._keeping(batch, iteration), iteration, iterations)
        yield Updated(result, self.learner.version, self.learner.kl_coef)

    def update(self, batch: TrainBatch, iteration: int, iterations: int | None) -> None:
        """The same on the other ranks, which report no progress."""
        self.learner.update(self._keeping(batch, iteration), iteration, lambda done, total: None, iterations)

    def _keeping(self, batch: TrainBatch, iteration: int) -> TrainBatch:
        """The batch with inputs that stay in this process once they are fetched, until its update has ended."""
        annotated, self.annotated = self.annotated, None
        if isinstance(batch.inputs, Annotated):
            assert annotated is not None, "annotated first"
            return replace(batch, inputs=annotated)
        limit = memory_limit(max(self.config.distributed.learners_per_node))
        return replace(batch, inputs=kept_rows(batch.inputs, self.learner.own_rows(batch, iteration), limit))

    def use_average(self, wanted: bool) -> None:
        """Swap the averages in for the weights, or the weights back."""
        assert self.learner.average is not None
        if wanted:
            self._averaged = self.learner.average.in_place()
            self._averaged.__enter__()
        else:
            self._averaged.__exit__(None, None, None)

    def send_weights(self, engines: EngineCalls, staged: bool) -> Sent:
        """Bring all engines to this learner's version; in a staged sync they still have to commit it."""
        if self.config.distributed.colocate:
            self.release_cached_memory()
            self.learner.ranks.any(False)  # all of them have, before the first engine wakes
        lost = self.sender.send(engines, self.learner.version, staged)
        return Sent(self.learner.version, lost, self.sender.num_bytes, engines.num_resent)


class LearnerGroup(RankGroup):
    """All ranks as one learner. `policy` reads observations; it has no weights."""

    def __init__(self, workers: Sequence[Worker], config: Config, policy: Policy) -> None:
        super().__init__(workers, config.distributed.start_timeout_s)
        self.config = config
        self.policy = policy
        self.version = 0
        self.kl_coef = config.kl.coef
        self.num_resent_buckets = 0  # of weight syncs, since they arrived damaged
        self.average = None if config.ema.beta is None else RankAverages(self)
        self.before_training: Callable[[], None] = lambda: None  # makes engines release memory that the ranks need
        self._annotated: TensorRows | None = None  # inputs that the ranks have, until the update

    def update(
        self, batch: TrainBatch, iteration: int, on_step: Callable[[int, int], None], iterations: int | None = None
    ) -> UpdateResult:
        """Train on a batch of decisions; `on_step` is called with the optimizer steps done and their total."""
        first, *others = self.workers
        self.before_training()
        annotated, self._annotated = self._annotated, None
        if batch.inputs is annotated:
            batch = replace(batch, inputs=Annotated())
        with self._lock:
            shared = put(batch)
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
        self.before_training()
        self._annotated = batch.inputs
        found: Annotations = self.call_all("annotate", put(batch), iteration, None if last is None else put(last))
        return found

    def send_weights(self, engine: EngineGroup) -> SyncCost:
        """Bring the engines to the current weights; one that is lost in the sync is replaced.

        In a staged sync they decide with their old weights until all of the new ones have arrived.
        """
        sync = _Sync()
        with engine.syncing:
            if not staged_syncs(self.config):
                with sync.excluding(engine):
                    self._send_directly(engine, sync)
                return sync.cost()
            calls = EngineCalls.to(engine.workers, self.config)
            sent = self._send(calls, sync, staged=True)
            with sync.excluding(engine):
                lost = sent.lost or _commit(calls, sent.version)
                if lost is None:
                    engine.version = sent.version
                else:  # what is left of the sync excludes generation: the new engine has only its base
                    self._replace(engine, lost, sync)
                    self._send_directly(engine, sync)
        return sync.cost()

    def refresh(self, engine: EngineGroup) -> None:
        """Bring engines that were replaced to the current weights, while nothing is generated."""
        with engine.syncing, engine.lock:
            self._send_directly(engine, _Sync())

    def _send_directly(self, engine: EngineGroup, sync: _Sync) -> None:
        while True:
            sent = self._send(EngineCalls.to(engine.workers, self.config), sync, staged=False)
            if sent.lost is None:
                engine.version = sent.version
                return
            self._replace(engine, sent.lost, sync)

    def _send(self, calls: EngineCalls, sync: _Sync, staged: bool) -> Sent:
        """Let the ranks send their weights once."""
        # In an asynchronous run the ranks may have finished an update that the driver does not know of yet.
        sent: Sent = self.call_all("send_weights", calls, staged, timeout_s=SYNC_LIMITS * calls.timeout_s)
        sync.num_bytes += sent.num_bytes
        sync.num_resent += sent.num_resent
        if sent.num_resent:
            self.num_resent_buckets += sent.num_resent
            log.warning(
                "%d buckets of weights arrived damaged and were sent again, %d in this session: check memory "
                "and network of the machines.",
                sent.num_resent,
                self.num_resent_buckets,
            )
        return sent

    def _replace(self, engine: EngineGroup, lost: str, sync: _Sync) -> None:
        sync.losses[lost] += 1
        if sync.losses[lost] == ENGINE_ATTEMPTS:
            raise ClusterError(
                f"{lost} could not be brought to the learners' weights, {ENGINE_ATTEMPTS} times over; "
                f"{self.workers[0].log_file} says why."
            )
        log.warning("%s was lost in a sync. It is replaced.", lost)
        engine.restart(lost)


def _commit(calls: EngineCalls, version: int) -> str | None:
    """Let all engines switch to the weights that they have kept; returns the name of one that was lost."""
    try:
        calls.commit(version)
    except EngineLostError as error:
        log.warning("%s", error)
        return error.engine
    return None


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
