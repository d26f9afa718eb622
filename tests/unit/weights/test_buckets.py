"""Buckets of a sync as bytes: what safetensors reads from them, and what is kept in memory."""

import weakref

import numpy as np
import torch
from safetensors.torch import load

from vlarl.weights.buckets import buckets, unpacked
from vlarl.weights.stream import WeightStream


def mixed() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5, generator=generator).bfloat16(),
        "whole": torch.randn(4, 2, generator=generator),
        "turned": torch.randn(4, 2, generator=generator).T,
        "count": torch.tensor(7),
        "part": torch.arange(10)[3:6],
    }


def stream(tensors: dict[str, torch.Tensor]) -> WeightStream:
    return WeightStream({name: tuple(t.shape) for name, t in tensors.items()}, tensors.__getitem__)


def test_a_bucket_is_what_the_library_reads_and_what_we_read():
    tensors = mixed()
    (payload,) = buckets(stream(tensors), 10_000)
    for read in (load(payload), unpacked(payload)):
        assert set(read) == set(tensors)
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_what_is_read_are_views_of_the_bytes():
    (payload,) = buckets(stream(mixed()), 10_000)
    begin = np.frombuffer(payload, np.uint8).ctypes.data
    for tensor in unpacked(payload).values():
        assert begin <= tensor.data_ptr() < begin + len(payload)
        assert (tensor.data_ptr() - begin) % tensor.itemsize == 0


def test_tensors_are_released_while_the_caller_has_their_bucket():
    alive: list[weakref.ref[np.ndarray]] = []  # the memory itself, whatever tensors look at it

    def make(name: str) -> torch.Tensor:
        memory = np.ones(1000, np.float32)
        alive.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    names = [str(index) for index in range(9)]
    held = [
        sum(ref() is not None for ref in alive)
        for _ in buckets(WeightStream({name: (1000,) for name in names}, make), 12_000)
    ]
    assert held == [1, 1, 1]  # the tensor that no longer fitted, and at the end the last one
