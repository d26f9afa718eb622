"""Timing on a CPU or a GPU: warm-ups, synchronised clocks, medians and quartiles; and what the machine can do."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vlarl.policies.bench_model import Work

GIB = 2**30
MATRIX = {"cuda": 8192, "cpu": 512}  # side of the matrices of the product that is timed
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes of the copy that is timed
RATE_REPEATS = 5
RATE_BATCH = 4  # products or copies in one repeat


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, and the memory at the peak of all."""

    seconds: tuple[float, ...]
    peak_bytes: int | None  # of torch's allocator; None on a CPU

    @property
    def median(self) -> float:
        """Seconds of the middle repeat."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Seconds that a quarter and three quarters of the repeats stay below."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third


@dataclass(frozen=True)
class Rates:
    """What the machine itself reaches, measured in the same run."""

    flops_per_s: float  # of a large matrix product in the model's type
    bytes_per_s: float  # of a copy in its memory, read and written bytes together

    def floor(self, work: Sequence[Work]) -> float:
        """The least seconds for passes that follow each other."""
        return sum(each.seconds(self.flops_per_s, self.bytes_per_s) for each in work)


def timed(
    work: Callable[[int], object],
    repeats: int,
    warmups: int,
    device: torch.device,
    prepare: Callable[[int], object] = lambda index: None,
) -> Timing:
    """Time `work`, which is given the index of the call, so that it can take other inputs each time; `prepare` comes
    before each call and does not count."""
    for index in range(warmups):
        prepare(index)
        work(index)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for index in range(warmups, warmups + repeats):
        prepare(index)
        synchronize(device)
        begin = time.perf_counter()
        work(index)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Timing(tuple(seconds), peak)


def synchronize(device: torch.device) -> None:
    """Wait for all that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Return memory that nothing uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Time a large matrix product and a large copy."""
    size, copied = MATRIX[device.type], COPIED[device.type]
    a, b, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    product = timed(lambda _: [torch.mm(a, b, out=out) for _ in range(RATE_BATCH)], RATE_REPEATS, 1, device)
    source, target = (torch.ones(copied // 4, device=device) for _ in range(2))
    copy = timed(lambda _: [target.copy_(source) for _ in range(RATE_BATCH)], RATE_REPEATS, 1, device)
    return Rates(RATE_BATCH * 2 * size**3 / product.median, RATE_BATCH * 2 * copied / copy.median)
