"""Parts of a cluster on this machine, measured by themselves: inputs of scaling_model.py that no training run gives.

crowding        how much longer a pass of the policy takes while every core makes one
ring            bytes a second of a sum over two processes (gloo), as learners sum their gradients
further calls   seconds of the driver for one more worker that it calls in the same round
copy            bytes a second into memory, as an engine takes over staged weights
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

ROUNDS = 9
PASSES = 3  # of a round
SUM_BYTES = 13_500_000  # weights of the built-in policy


@dataclass(frozen=True)
class Parts:
    """What was measured."""

    crowding: float
    ring_bytes_per_s: float
    further_call_s: float
    copy_bytes_per_s: float


def measured_parts(num_cores: int) -> Parts:
    """All of them, one after the other."""
    ones = torch.ones(SUM_BYTES // 4)
    return Parts(
        crowding=crowding(num_cores),
        ring_bytes_per_s=SUM_BYTES / sum_seconds(),
        further_call_s=further_call_seconds(),
        copy_bytes_per_s=SUM_BYTES / float(np.median([_seconds(ones.clone) for _ in range(ROUNDS)])),
    )


def crowding(num_cores: int) -> float:
    """Passes in every core at the same time versus one alone, in alternation: the median of the ratios."""
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for _ in range(num_cores):
        here, there = context.Pipe()
        workers.append(context.Process(target=_passes, args=(there,), daemon=True))
        workers[-1].start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()

    def seconds_of(chosen: list[Any]) -> float:
        for pipe in chosen:
            pipe.send(True)
        return max(pipe.recv() for pipe in chosen)

    ratios = []
    for _ in range(ROUNDS):
        alone = seconds_of(pipes[:1])
        ratios.append(seconds_of(pipes) / alone)
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(False)
        worker.join()
    return max(float(np.median(ratios)), 1.0)


def _passes(pipe: Connection) -> None:
    """Forward and backward passes of the built-in policy, whenever the other end wants some."""
    from vlarl.decisions import Sampling
    from vlarl.envs.tabletop.pool import TabletopPool
    from vlarl.policies.load import load_policy
    from vlarl.rollout.engines.torch import TorchEngine
    from vlarl.types import Task

    torch.set_num_threads(1)
    policy: Any = load_policy("builtin:tiny-openvla")
    pool = TabletopPool("tabletop_spatial", 16, policy.image_size, ("agent",))
    inputs = policy.process(pool.reset(range(16), [Task("tabletop_spatial", i % 10, 0, i) for i in range(16)]))
    engine = TorchEngine(policy, torch.device("cpu"))

    def work() -> None:
        decisions = engine.generate(inputs, Sampling(1.0), list(range(16)))
        policy.evaluate(inputs, decisions, 1.0).logprobs.sum().backward()

    work()
    pipe.send(True)
    while pipe.recv():
        pipe.send(_seconds(lambda: [work() for _ in range(PASSES)]))


def sum_seconds() -> float:
    """Seconds of a sum of SUM_BYTES over two processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    workers = [context.Process(target=_sums, args=(rank, port, there), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    seconds: float = here.recv()
    for worker in workers:
        worker.join()
    return seconds


def _sums(rank: int, port: int, pipe: Connection) -> None:
    """One of two ranks."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(minutes=2)
    )
    ones = torch.ones(SUM_BYTES // 4)
    found = [_seconds(lambda: torch.distributed.all_reduce(ones)) for _ in range(ROUNDS)]
    if rank == 0:
        pipe.send(float(np.median(found)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def further_call_seconds() -> float:
    """Calls of two actors of Ray versus one, in alternation."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        actors = [ray.remote(_Idle).remote() for _ in range(2)]
        given = np.zeros(256, np.float32)

        def call(count: int) -> None:
            ray.get([actor.work.remote(given) for actor in actors[:count]])

        for _ in range(50):
            call(2)
        found = [_seconds(lambda: call(2)) - _seconds(lambda: call(1)) for _ in range(300)]
        return max(float(np.median(found)), 0.0)
    finally:
        ray.shutdown()


class _Idle:
    """An actor that does nothing."""

    def work(self, given: Any) -> Any:
        """Return what it was given."""
        return given


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
