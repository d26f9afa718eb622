"""How long a GPU computes: the union of its kernels and copies in a trace of torch.profiler.

The profiler slows the host down, and hardly the kernels. So the seconds of the kernels come from a profiled call, and
the seconds they are divided by from the same call without a profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vlarl.bench.timing import synchronize

MICROSECONDS = 1e6  # in a second


def kernel_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds in which at least one kernel or copy of `work` runs on the GPU."""
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        synchronize(device)
    return on_gpu(trace.events() or ())


def on_gpu(events: Iterable[Any]) -> float:
    """Seconds of the kernels and copies of a trace; spans of annotations on the GPU's timeline don't count."""
    kernels = (e for e in events if e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False))
    return union((event.time_range.start, event.time_range.end) for event in kernels) / MICROSECONDS


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of all intervals together, where they overlap counted once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
