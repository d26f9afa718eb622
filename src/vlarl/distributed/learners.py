"""Learners as workers of a cluster: an actor for each rank, behind the interface of one learner.

    LearnerGroup ── update(batch), values(…), save(…) … ──► Rank 0, Rank 1 …   all of them, in the same order
                 ◄── rank 0's answer ────────────────────
    Rank 0 ── weights, bucket by bucket ──► engines         the others take part where weights are gathered

Ranks wait for each other inside every call (training/ranks.py), so a call goes to all of them or to none. Several
threads may call: a lock keeps the order. The batch is put into the object store once, and read there by all ranks of a
machine.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import Config
from vlarl.distributed.actor import Worker, get_all, share
from vlarl.distributed.engines import EngineGroup
from vlarl.distributed.weights import EngineCalls, WeightSender, free_address
from vlarl.errors import ClusterError
from vlarl.policies.base import Policy
from vlarl.policies.load import DTYPES
from vlarl.rollout.engines.base import Engine
from vlarl.training.checkpoint import CheckpointStore, policy_folder
from vlarl.training.fsdp import Sharding
from vlarl.training.learner import Learner
from vlarl.training.prepare import load_trained_policy
from vlarl.training.ranks import ProcessGroup, Ranks, SingleRank
from vlarl.training.state import TrainerState
from vlarl.types import FloatArray, PolicyInput, TrainBatch, Trajectory, UpdateResult

log = logging.getLogger(__name__)

ENGINE_ATTEMPTS = 3  # to bring engines to the learners' weights, replacing those that fail


@dataclass(frozen=True)
class SharedBatch:
    """A batch as arrays, which all ranks of a machine read in the object store itself, without a copy."""

    inputs: dict[str, Any]
    columns: dict[str, Any]

    @classmethod
    def of(cls, batch: TrainBatch) -> SharedBatch:
        """To be put into the store."""
        columns = _as_arrays(batch)
        del columns["inputs"]
        return cls(_as_arrays(batch.inputs), columns)

    def batch(self) -> TrainBatch:
        """As the learner takes it; nobody may write into it."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            inputs, columns = ({n: _as_tensor(v) for n, v in part.items()} for part in (self.inputs, self.columns))
        return TrainBatch(inputs=PolicyInput(**inputs), **columns)


def _as_arrays(record: TrainBatch | PolicyInput) -> dict[str, Any]:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {n: v.contiguous().numpy() if isinstance(v, torch.Tensor) else v for n, v in values.items()}


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


@dataclass(frozen=True)
class Updated:
    """What an update came to, and where it left the learner."""

    result: UpdateResult
    version: int
    kl_coef: float


class Rank:
    """One of the processes that learn; made and called over there."""

    def __init__(self, config: Config, world_size: int, on_gpu: bool, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cuda:0" if on_gpu else "cpu")  # the first that Ray lets this process see

    def meeting_point(self) -> tuple[str, int]:
        """Address and free port of this machine, where ranks find each other."""
        return free_address()

    def join(self, address: str, port: int, checkpoint: Path | None) -> None:
        """Meet the other ranks and build the learner."""
        d = self.config.distributed
        ranks: Ranks = SingleRank()
        if self.world_size > 1 or d.sharding != "none":
            deadline = timedelta(seconds=d.timeout_s)
            ranks = ProcessGroup.join(self.rank, self.world_size, address, port, self.device, deadline)
        torch.manual_seed(self.config.run.seed)
        sharding = Sharding(d.sharding, d.shard_group_size, d.cpu_offload, d.compute_dtype and DTYPES[d.compute_dtype])
        place = self.device if sharding.mode == "none" else torch.device("cpu")
        policy = load_trained_policy(self.config, policy_folder(checkpoint) if checkpoint else None, place)
        algorithm = build_algorithm(self.config.algorithm, self.config.rollout.temperature, self.config.kl, policy)
        self.learner = Learner(policy, algorithm, self.config, self.device, ranks, sharding)
        self.sender = WeightSender(policy, ranks, self.config)

    def open_store(self, folder: Path) -> None:
        """Keep checkpoints there."""
        self.store = CheckpointStore(folder, self.config.checkpoint.keep, self.learner.ranks)

    def restore(self, checkpoint: Path) -> tuple[TrainerState, int, float]:
        """Go on from a checkpoint; the counters, the version and the KL's coefficient."""
        return self.store.restore(self.learner, checkpoint), self.learner.version, self.learner.kl_coef

    def save(self, name: str, state: TrainerState) -> Path:
        """Write a checkpoint."""
        return self.store.save(name, self.learner, state)

    def save_policy(self, name: str, metadata: dict[str, Any]) -> Path:
        """Write the policy alone."""
        return self.store.save_policy(name, self.learner.policy, metadata)

    def updating(
        self, batch: SharedBatch, iteration: int, iterations: int | None
    ) -> Iterator[tuple[int, int] | Updated]:
        """Train on a batch: how far it is after each optimizer step, and at last what came of it."""
        result = yield from self.learner.updating(batch.batch(), iteration, iterations)
        yield Updated(result, self.learner.version, self.learner.kl_coef)

    def update(self, batch: SharedBatch, iteration: int, iterations: int | None) -> None:
        """The same on ranks that nobody watches."""
        self.learner.update(batch.batch(), iteration, lambda done, total: None, iterations)

    def values(self, trajectories: Sequence[Trajectory]) -> list[FloatArray] | None:
        """The critic's values, from rank 0."""
        values = self.learner.values(trajectories)
        return values if self.rank == 0 else None

    def reference_logprobs(self, trajectories: Sequence[Trajectory]) -> list[Trajectory] | None:
        """The trajectories with the reference's log-probs, and the learner's where they are needed, from rank 0."""
        scored = self.learner.with_reference(trajectories)
        return scored if self.rank == 0 else None

    def use_average(self, wanted: bool) -> None:
        """Put the averages in the weights' place, or the weights back."""
        assert self.learner.average is not None
        if wanted:
            self._averaged = self.learner.average.in_place()
            self._averaged.__enter__()
        else:
            self._averaged.__exit__(None, None, None)

    def send_weights(self, engines: EngineCalls) -> tuple[int, str | None]:
        """Bring all engines to the version that this learner is at; which it is, and an engine that was lost."""
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

    def join(self, checkpoint: Path | None) -> None:
        """Let the ranks meet at rank 0's address and build their learners."""
        first = self.workers[0]
        address, port = first.get(first.ask("meeting_point"))
        self.everybody("join", address, port, checkpoint, timeout_s=self.config.distributed.start_timeout_s)

    def everybody(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Ask all ranks the same; rank 0's answer. Whatever fails on one of them fails here at once."""
        with self._lock:
            questions = [worker.ask(method, *arguments, timeout_s=timeout_s) for worker in self.workers]
        return get_all(questions)[0]

    def update(
        self, batch: TrainBatch, iteration: int, on_step: Callable[[int, int], None], iterations: int | None = None
    ) -> UpdateResult:
        """Train on a batch of decisions; `on_step` is told how many optimizer steps are done, of how many."""
        first, *others = self.workers
        with self._lock:
            shared = share(SharedBatch.of(batch))
            steps = first.stream("updating", shared, iteration, iterations)
            waiting = {(q := worker.ask("update", shared, iteration, iterations)).reference: q for worker in others}
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
                    question = waiting.pop(reference)
                    question.worker.get(question)
        for question in waiting.values():
            question.deadline = time.monotonic() + first.timeout_s
        get_all(list(waiting.values()))
        self.version, self.kl_coef = updated.version, updated.kl_coef
        return updated.result

    def values(self, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        """The critic's values [T+1, V] of each trajectory, the last observation included."""
        values: list[FloatArray] = self.everybody("values", share(list(trajectories)))
        return values

    def with_reference(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with the reference's log-probs of every decision, and with the learner's own where the KL is
        part of the reward; as they are where there is no reference."""
        if self.config.kl.coef == 0:
            return list(trajectories)
        scored: list[Trajectory] = self.everybody("reference_logprobs", share(list(trajectories)))
        return scored

    def publish(self, engine: Engine) -> None:
        """Bring the engines to the weights as they are now; one that is lost on the way is replaced."""
        if not isinstance(engine, EngineGroup):
            raise TypeError(f"learners of a cluster publish to its engines, not to {type(engine).__name__}")
        with engine.lock:
            losses: Counter[str] = Counter()
            while True:
                calls = EngineCalls.to(engine.workers, self.config)
                # Rank 0 gives an engine the whole limit for each of its calls, and must itself be waited for.
                # In a run whose rollouts are ahead, they may have made an update that the driver has not heard of.
                version, lost = self.everybody("send_weights", calls, timeout_s=4 * calls.timeout_s)
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
        """Inside the block the ranks have the averages for their weights."""
        self._group.everybody("use_average", True)
        try:
            yield
        finally:
            self._group.everybody("use_average", False)


class RankStore:
    """The checkpoints of a run, which the ranks write and read together."""

    def __init__(self, group: LearnerGroup, folder: Path) -> None:
        self._group = group
        group.everybody("open_store", folder.absolute())

    def save(self, name: str, learner: Any, state: TrainerState) -> Path:
        """Write a checkpoint that training can go on from."""
        path: Path = self._group.everybody("save", name, state)
        return path

    def save_policy(self, name: str, policy: Policy, metadata: dict[str, Any]) -> Path:
        """Write the policy alone, with a note of what it is."""
        path: Path = self._group.everybody("save_policy", name, metadata)
        return path

    def restore(self, learner: Any, checkpoint: Path) -> TrainerState:
        """Put all ranks back where the checkpoint was written."""
        state, self._group.version, self._group.kl_coef = self._group.everybody("restore", checkpoint.absolute())
        restored: TrainerState = state
        return restored
