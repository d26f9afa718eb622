"""Learner ranks as workers of a cluster: what `vlarl train` (learners.py) and `vlarl finetune` (finetune.py) share.

Ranks wait for each other inside every call (training/ranks.py), so a call goes to all of them or to none. When one of
them dies, the others fail in their call, since nothing comes from it any more: the error is about the one that died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
import torch

from vlarl.config.schema import RanksConfig
from vlarl.distributed.actor import Request, Worker, get_all
from vlarl.distributed.address import free_address
from vlarl.errors import VlarlError, WorkerFailedError, WorkerLostError
from vlarl.policies.load import DTYPES
from vlarl.training.fsdp import Sharding
from vlarl.training.ranks import ProcessGroup, Ranks, SingleRank

DEATH_S = 10.0  # until the death of a worker is seen, after others have failed because of it


class RankProcess:
    """One of the learner processes; built and called in the worker's process."""

    def __init__(self, distributed: RanksConfig, world_size: int, on_gpu: bool, rank: int) -> None:
        self._distributed = distributed
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cuda:0" if on_gpu else "cpu")  # the first that Ray makes visible to this process

    def meeting_point(self) -> tuple[str, int]:
        """Address and free port of this machine, where the process group's ranks meet."""
        return free_address()

    def join_others(self, address: str, port: int, limit_s: float) -> Ranks:
        """Join the other ranks; one that waits longer than this for another one fails."""
        if self.world_size == 1 and self._distributed.sharding == "none":
            return SingleRank()
        return ProcessGroup.join(self.rank, self.world_size, address, port, self.device, timedelta(seconds=limit_s))

    @property
    def sharding(self) -> Sharding:
        """How the weights are distributed over the ranks."""
        d = self._distributed
        return Sharding(d.sharding, d.shard_group_size, d.cpu_offload, d.compute_dtype and DTYPES[d.compute_dtype])


class RankGroup:
    """All ranks, which are called together. Several threads may call: a lock keeps the order."""

    def __init__(self, workers: Sequence[Worker], start_timeout_s: float) -> None:
        self.workers = list(workers)
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()

    def join(self, *arguments: Any) -> Any:
        """Make the ranks join at rank 0's address and build what they train; rank 0's result."""
        first = self.workers[0]
        address, port = first.get(first.call("meeting_point"))
        return self.call_all("join", address, port, *arguments, timeout_s=self._start_timeout_s)

    def call_all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method on all ranks; rank 0's result. What fails on one of them fails here at once."""
        with self._lock:
            requests = [worker.call(method, *arguments, timeout_s=timeout_s) for worker in self.workers]
        try:
            return get_all(requests)[0]
        except WorkerFailedError as failed:
            raise _death_behind(failed, requests) from None


def _death_behind(failed: WorkerFailedError, requests: Sequence[Request]) -> WorkerLostError:
    """The death of another worker that a failure may come from, which is seen a little later; else the failure."""
    waiting = {request.reference: request for request in requests if request.worker.name != failed.worker}
    end = time.monotonic() + DEATH_S
    while waiting and (left := end - time.monotonic()) > 0:
        for reference in ray.wait(list(waiting), timeout=left)[0]:
            request = waiting.pop(reference)
            try:
                request.worker.get(request)
            except WorkerFailedError:
                continue
            except WorkerLostError as lost:
                return lost
            except VlarlError:
                continue
    return failed
