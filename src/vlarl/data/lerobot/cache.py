"""A cache of bounded size, whose values are computed once even if several threads need them at the same time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Keeps the values that were used last, up to a total size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._num_bytes = 0
        self._making: dict[Hashable, Lock] = {}
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], tuple[Value, int]]) -> Value:
        """The value of a key; `make` returns it with its size in bytes."""
        with self._lock:
            making = self._making.setdefault(key, Lock())
        with making:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key][0]
            value, size = make()
            with self._lock:
                self._kept[key] = (value, size)
                self._num_bytes += size
                while self._num_bytes > self._max_bytes and len(self._kept) > 1:
                    _, (_, freed) = self._kept.popitem(last=False)
                    self._num_bytes -= freed
            return value
