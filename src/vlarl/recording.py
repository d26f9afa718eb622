"""CUDA graphs: the kernels of a pass are recorded once and replayed as a whole, without Python in between.

    warm      runs a pass on the stream of the recordings, so that libraries are initialised and kernels loaded for it
    record    runs Python once, and no kernel: what would have been launched is kept
    replay    launches all of it, on the memory that was recorded

All recordings of a device share one pool: what a pass needs only while it runs is used by the others in their turn.
Nothing else may be replayed between a replay and the reading of its results, which is what `replaying` guards.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")


class Replay(Protocol):
    """A recorded pass."""

    def replay(self) -> None:
        """Launch it; its results are those that recording it returned, in their memory."""
        ...


class Recorder(Protocol):
    """Records passes; the one below does so on a GPU, a test's own anywhere."""

    def warm(self, work: Callable[[], Result]) -> Result:
        """Run a pass that is going to be recorded."""
        ...

    def record(self, work: Callable[[], Result]) -> tuple[Replay, Result]:
        """A recording of the pass and its results, which have values after each replay only."""
        ...

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Around a replay and the reading of its results."""
        ...


class GraphRecorder:
    """Records passes on one GPU."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        # One for all: memory of a pool belongs to a stream.
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._lock = threading.RLock()
        # A pool is gone with its last recording, and its handle can't be used again: one recording outlives all others.
        self._keeper, self._kept = self.record(lambda: torch.zeros(1, device=self._device))

    def warm(self, work: Callable[[], Result]) -> Result:
        """Run a pass that is going to be recorded."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def record(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """A recording of the pass and its results, which have values after each replay only."""
        here = torch.cuda.stream(torch.cuda.current_stream(self._device))  # restored even if ending a recording fails
        with self._lock, torch.cuda.device(self._device), here:
            gc.collect()  # a graph of autograd that waits for it could refer to another stream
            graph = torch.cuda.CUDAGraph()
            # Errors of this thread alone: others may use the GPU meanwhile, and backward passes run in autograd's own.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result = work()
        return graph, result

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Around a replay and the reading of its results."""
        with self._lock:
            yield


def graph_recorder(device: torch.device) -> GraphRecorder:
    """The recorder of a GPU, the same for everything in this process."""
    return _recorder(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _recorder(index: int) -> GraphRecorder:
    return GraphRecorder(index)
