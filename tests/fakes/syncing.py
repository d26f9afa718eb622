"""Weight syncs as a learner makes them, to one engine."""

from collections.abc import Collection, Iterable
from typing import Any

import torch

from vlarl.policies.base import Policy
from vlarl.weights.buckets import bucket_message, buckets
from vlarl.weights.stream import WeightStream


def stream_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightStream:
    found = {name: tensor.detach() for name, tensor in tensors}
    return WeightStream({name: tuple(tensor.shape) for name, tensor in found.items()}, found.__getitem__)


def all_weights(policy: Policy) -> WeightStream:
    """Everything that engines have, trained or not."""
    return stream_of(policy.engine_weights().items())


def only(stream: WeightStream, names: Collection[str]) -> WeightStream:
    return WeightStream({name: shape for name, shape in stream.shapes.items() if name in names}, stream.make)


def messages(stream: WeightStream, bucket_bytes: int = 1 << 20, checksum: bool = True) -> list[dict[str, Any]]:
    return [bucket_message(payload, checksum) for payload in buckets(stream, bucket_bytes)]


def sync(engine: Any, stream: WeightStream, version: int, staged: bool = False) -> None:
    """Bring the engine to these weights."""
    engine.start_sync(dict(stream.shapes), version, staged)
    for message in messages(stream):
        engine.update_weights(message)
    engine.finish_sync(version)
