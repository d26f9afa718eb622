"""How much memory tensors take at the same time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Inside the block, `peak` is the most bytes that tensors made in it have had at one time; `largest` the bytes of
    the largest one. Passes forward and backward are seen alike."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id_of(tensor) not in given:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def id_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def reset_peak_rss() -> int:
    """Start measuring the peak of this process's memory on Linux; returns the bytes that it has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_rss()


def peak_rss() -> int:
    """The most bytes of memory that this process has had since `reset_peak_rss`, pages of mapped files included."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
