"""The engine's side of a weight sync: one state machine for every kind of engine.

    up to date ── start_sync ──► syncing ── update_weights … ── finish_sync ──► up to date, of the new version
                                    │
                                    └── a message that fails, or abandon_sync ──► halfway ── start_sync ──► syncing

An engine acts only while it is up to date. One that was left halfway mixes weights of two versions, until a sync has
brought again all that the failed one announced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from vlarl.errors import VlarlError
from vlarl.weights.buckets import bucket_names, verified
from vlarl.weights.stream import check_shapes


class WeightReceiver(ABC):
    """Takes weights from learners in other processes; engines that have weights of their own derive from it."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], missing: Collection[str] = ()) -> None:
        """`shapes` are those of all weights that the engine has; `missing` are those without which it can't act, and
        which the first sync has to bring."""
        self.version = 0
        self.shapes = shapes
        self._missing = "the engine has only its base until the first sync" if missing else ""  # why it can't act
        self._syncing: int | None = None  # the version of the current sync
        self._announced: set[str] = set()  # weights of the current sync
        self._awaited: set[str] = set()  # those of them that have not arrived yet
        self._required = set(missing)  # what the next sync has to bring: also what failed syncs left halfway

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
        """Start a sync of weights with these names and shapes; what doesn't fit is refused before anything changes."""
        if self._syncing is not None:
            raise VlarlError(f"version {version} can't be loaded: the sync to version {self._syncing} has not ended")
        check_shapes(shapes, self.shapes, sorted(self._required))
        self._syncing, self._announced, self._awaited = version, set(shapes), set(shapes)
        self._missing = f"the sync to version {version} has not ended"
        self.prepare_loading(set(shapes))

    def update_weights(self, message: dict[str, Any]) -> None:
        """Load one message of a sync; one that fails ends the sync."""
        if self._syncing is None:
            raise VlarlError("no sync is in progress that the weights could belong to: start one")
        try:
            self._awaited -= self.load(message)
        except BaseException:
            self.abandon_sync()
            raise

    def bucket_of(self, message: dict[str, Any]) -> tuple[bytes, set[str]]:
        """The bucket of a message and the names of its weights; VlarlError if it is damaged or was not announced."""
        payload = verified(message)
        names = bucket_names(payload)
        if surplus := names - self._awaited:
            raise VlarlError(f"{min(surplus)} was not announced for the sync to version {self._syncing}: sync again")
        return payload, names

    def finish_sync(self, version: int) -> None:
        """Act with the new weights from now on."""
        if self._syncing != version:
            raise VlarlError(f"version {version} was not started: the sync in progress is to version {self._syncing}")
        if self._awaited:
            raise VlarlError(
                f"version {version} is incomplete: {len(self._awaited)} weights have not arrived, such as "
                f"{min(self._awaited)}. Send them, or abandon the sync (abandon_sync) and start another."
            )
        self.finish_loading(version)
        self._syncing, self._missing = None, ""
        self._required.clear()
        self.version = version

    def abandon_sync(self) -> None:
        """Abandon a sync that can't be finished; the engine acts again after one that brings all of its weights."""
        if self._syncing is None:
            return
        self._missing = f"the sync to version {self._syncing} failed halfway"
        self._required |= self._announced
        self._syncing = None
        self.drop_loading()

    def check_usable(self) -> None:
        """VlarlError while the engine can't act."""
        if self._missing:
            raise VlarlError(f"the engine can't act: {self._missing}. Sync it, or replace it.")

    @abstractmethod
    def prepare_loading(self, names: set[str]) -> None:
        """Called when a sync of these weights starts."""

    @abstractmethod
    def load(self, message: dict[str, Any]) -> set[str]:
        """Load the weights of a message; returns their names."""

    @abstractmethod
    def finish_loading(self, version: int) -> None:
        """Called when all weights have been loaded: nothing that was computed with older ones may be used again."""

    @abstractmethod
    def drop_loading(self) -> None:
        """Called when a sync has failed."""
