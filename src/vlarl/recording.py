"""CUDA graphs: the kernels of a pass are recorded once and replayed as a whole, without Python in between.

    warm      runs a pass on the stream of the recordings, so that libraries are initialised and kernels loaded for it
    record    runs Python once, and no kernel: what would have been launched is kept
    replay    launches all of it, on the memory that was recorded

All recordings of a device share one pool: what a pass needs only while it runs is used by the others in their turn.
Nothing else may be replayed between a replay and the reading of its results, which is what `replaying` guards.

The pool is as large as the largest pass, and stays allocated. Where memory is scarce, all recordings are released:
around an update, and before a pass that is run for the first time, which needs as much once more. They are made again
when they are needed.
"""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch

Result = TypeVar("Result")


class Replay(Protocol):
    """A recorded pass."""

    def replay(self) -> None:
        """Launch it; its results are those that recording it returned, in their memory."""
        ...


class Owner(Protocol):
    """Keeps recordings."""

    def forget(self) -> bool:
        """Drop all recordings; whether there were any."""
        ...


class Recorder(ABC):
    """Records passes; the one below does so on a GPU, a test's own anywhere."""

    def __init__(self) -> None:
        self.scarce = False  # whether there is no memory for recordings beside other passes
        self._owners: WeakSet[Owner] = WeakSet()
        self._used = False  # whether the pool may hold memory, also of a recording that failed or whose owner is gone

    def add(self, owner: Owner) -> None:
        """Let an object know when its recordings have to be dropped."""
        self._owners.add(owner)

    def release(self) -> bool:
        """Free the memory of all recordings; whether there were any."""
        had = any([owner.forget() for owner in self._owners])  # a list: all of them
        if self._used:
            self.renew()
            self._used = False
        return had

    def before_first_pass(self) -> None:
        """Called before a pass is run that was not recorded yet."""
        if self.scarce:
            self.release()

    def renew(self) -> None:  # noqa: B027 - nothing to do without a GPU
        """Called when all recordings are gone: give back their memory."""

    @abstractmethod
    def warm(self, work: Callable[[], Result]) -> Result:
        """Run a pass that is going to be recorded."""

    def record(self, work: Callable[[], Result]) -> tuple[Replay, Result]:
        """A recording of the pass and its results, which have values after each replay only."""
        self._used = True
        return self.capture(work)

    @abstractmethod
    def capture(self, work: Callable[[], Result]) -> tuple[Replay, Result]:
        """Make the recording."""

    @abstractmethod
    def replaying(self) -> AbstractContextManager[None]:
        """Around a replay and the reading of its results."""


class GraphRecorder(Recorder):
    """Records passes on one GPU."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._device = torch.device("cuda", index)
        # One for all: memory of a pool belongs to a stream.
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()
        self.renew()

    def renew(self) -> None:
        """Begin another pool: one is gone with its last recording, and its handle can't be used again."""
        with self._lock:
            torch.cuda.synchronize(self._device)  # no recording may be running
            self._keeper = self._kept = None
            self._pool = torch.cuda.graph_pool_handle()
            # One recording outlives all others. Recording begins by giving back cached memory, that of the old pool too
            self._keeper, self._kept = self.capture(lambda: torch.zeros(1, device=self._device))

    def warm(self, work: Callable[[], Result]) -> Result:
        """Run a pass that is going to be recorded."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return work()
        finally:  # also what a pass had launched that failed: the next one may write to the same memory
            current.wait_stream(self._stream)

    def capture(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Make the recording."""
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


RECORDERS: dict[int, GraphRecorder] = {}
"""By the index of their GPU."""


def graph_recorder(device: torch.device) -> GraphRecorder:
    """The recorder of a GPU, the same for everything in this process."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in RECORDERS:
        RECORDERS[index] = GraphRecorder(index)
    return RECORDERS[index]


def release_recordings(device: torch.device) -> bool:
    """Free the memory of all recordings on a device; whether there were any."""
    return bool(RECORDERS) and device.type == "cuda" and graph_recorder(device).release()
