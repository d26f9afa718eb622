"""`vlarl bench sync`: how long an engine takes to get weights that have changed, and how many bytes travel.

    colocated   the engine of this process reads the learner's own memory: nothing is copied
    replica     an engine in another process, which is sent buckets through a pipe: adapters, or all weights

Agreement is the fraction of greedy tokens that the replica's engine has in common with this process after the last
sync.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vlarl.bench.replica import start_replica
from vlarl.bench.request import Bench, BenchRequest
from vlarl.bench.results import Report, Row
from vlarl.bench.rollout import equal_tokens
from vlarl.bench.timing import Timing, release, synchronize, timed
from vlarl.decisions import Sampling
from vlarl.policies.base import Policy
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.weights.buckets import bucket_message, buckets, content_bytes
from vlarl.weights.stream import WeightStream, is_adapter_weight, weights_to_send

MB = 10**6
COMPARED_ROWS = 2
FACTOR, ADDED = 1.01, 1e-3  # what changes weights before a sync, and what is added to adapters, half of which are 0


class Receiver(Protocol):
    """The engine's side of a sync (weights/receiver.py)."""

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None: ...  # noqa: D102
    def update_weights(self, message: dict[str, Any]) -> None: ...  # noqa: D102
    def finish_sync(self, version: int) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class Sent:
    """What a sync sent."""

    num_bytes: int  # of weights
    num_buckets: int


def send(engine: Receiver, weights: WeightStream, bucket_bytes: int, version: int) -> Sent:
    """A direct sync, one bucket after the other."""
    num_bytes = num_buckets = 0
    engine.start_sync(weights.shapes, version)
    for payload in buckets(weights, bucket_bytes):
        num_bytes, num_buckets = num_bytes + content_bytes(payload), num_buckets + 1
        engine.update_weights(bucket_message(payload, checksum=False))
        del payload  # not kept while the next one is filled
    engine.finish_sync(version)
    return Sent(num_bytes, num_buckets)


def bench_sync(request: BenchRequest, bucket_mb: int) -> Report:
    """Measure syncs of adapters, of all weights, or of both."""
    bench = Bench(request)
    policy = bench.load()
    settings = bench.settings(policy, bucket_mb=bucket_mb)
    rows = []
    if request.adapters is not True:
        rows.append(bench.attempt("replica, all weights", 1, lambda: _replica(bench, policy, bucket_mb)))
    if request.adapters is False:
        rows.insert(0, _colocated(bench, policy))
    else:
        if rows:  # the replica starts from the checkpoint, and this policy's own weights were changed
            del policy
            release(bench.device)
            policy = bench.load()
        bench.adapt(policy)
        rows.insert(0, _colocated(bench, policy))
        name = f"replica, adapters of rank {request.rank}"
        rows.append(bench.attempt(name, 1, lambda: _replica(bench, policy, bucket_mb)))
    notes = ["per s counts syncs. The colocated engine's peer is a copy of all weights in the same memory."]
    return Report("sync", settings, bench.rates, rows, notes)


@torch.no_grad()
def change(policy: Policy) -> None:
    """Change what is trained, as an update would."""
    for name, parameter in policy.engine_weights().items():
        if parameter.requires_grad:
            parameter.add_(ADDED) if is_adapter_weight(name) else parameter.mul_(FACTOR)


def _colocated(bench: Bench, policy: Policy) -> Row:
    engine = TorchEngine(policy, bench.device)
    repeats = bench.request.repeats

    def changed(_: int) -> None:
        change(policy)
        synchronize(bench.device)

    ours = timed(lambda index: engine.weights_changed(index + 1), repeats, 1, bench.device, changed)
    held = list(policy.engine_weights().values())
    same = {id(weight) for weight in engine.policy.engine_weights().values()} == {id(weight) for weight in held}
    copied = sum(weight.nbytes for weight in held)
    peer = _copied(bench, held) if bench.request.peers else None
    facts = {"bytes": 0 if same else copied, "bytes_of_all_weights": copied}
    return Row("colocated engine", 1, ours, peer, "copy of all weights", facts=facts)


@torch.no_grad()
def _copied(bench: Bench, weights: list[torch.nn.Parameter]) -> Timing:
    """The time to copy all weights, one after the other into the same memory."""
    largest = max(weights, key=lambda weight: weight.nbytes)
    target = torch.empty(largest.nbytes, dtype=torch.uint8, device=bench.device)

    def copy(_: int) -> None:
        for weight in weights:
            target[: weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)

    return timed(copy, bench.request.repeats, 1, bench.device)


def _replica(bench: Bench, policy: Policy, bucket_mb: int) -> Row:
    adapters = policy.has_adapter
    weights = weights_to_send(policy)
    sent: list[Sent] = []
    with closing(start_replica(bench.request, adapters=adapters)) as engine:
        ours = timed(
            lambda index: sent.append(send(engine, weights, bucket_mb * MB, index + 1)),
            bench.request.repeats,
            1,
            bench.device,
            lambda _: change(policy),
        )
        policy.weights_changed()
        model, seeds, greedy = policy.bench_model(), list(range(COMPARED_ROWS)), Sampling(temperature=0.0)
        inputs = model.inputs(COMPARED_ROWS, seed=0)
        here = TorchEngine(policy, bench.device, cuda_graphs=False).generate(inputs, greedy, seeds)
        equal = equal_tokens(model.tokens(here), model.tokens(engine.generate(inputs, greedy, seeds)))
    name = f"replica, adapters of rank {bench.request.rank}" if adapters else "replica, all weights"
    facts = {"bytes": sent[-1].num_bytes, "buckets": sent[-1].num_buckets, "equal_tokens": equal}
    return Row(name, 1, ours, agreement=f"{equal:.1%}", facts=facts)
