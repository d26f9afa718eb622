"""The engine's side of a weight sync: one state machine for every kind of engine.

direct:

    up to date ── start_sync ──► syncing ── update_weights … ── finish_sync ──► up to date, of the new version
                                    │
                                    └── a message that fails, or abandon_sync ──► halfway ── start_sync ──► syncing

staged:

    up to date ── start_sync ──► up to date, ── update_weights … ── finish_sync, which loads all ──► of the new version
                                 keeps buckets       │                          └── fails ──► halfway
                                                     └── a message that fails, or abandon_sync ──► up to date, as before

A bucket that arrives damaged is refused before any of it is loaded or kept; the sync continues, and the bucket is sent
again.

An engine acts only while it is up to date. One that was left halfway mixes weights of two versions, until a sync has
brought again all that the failed one announced.

A direct sync loads each bucket as it arrives. A staged one keeps all of them in host memory, a second copy of what is
trained, and the engine acts with its old weights meanwhile: only `finish_sync` interrupts it. One that could not act
before a staged sync (it has only its base, or was left halfway) acts after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from vlarl.errors import VlarlError
from vlarl.weights.buckets import DamagedBucketError, bucket_message, bucket_names, verified
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
        self._staged: list[dict[str, Any]] | None = None  # buckets of a staged sync; None: the sync is direct
        self._required = set(missing)  # what the next sync has to bring: also what failed syncs left halfway

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int, staged: bool = False) -> None:
        """Start a sync of weights with these names and shapes; what doesn't fit is refused before anything changes.

        A staged sync takes buckets of bytes alone, not what vLLM's own senders send.
        """
        if self._syncing is not None:
            raise VlarlError(f"version {version} can't be loaded: the sync to version {self._syncing} has not ended")
        check_shapes(shapes, self.shapes, sorted(self._required))
        self._syncing, self._announced = version, set(shapes)
        if staged:
            self._staged, self._awaited = [], set(shapes)
        else:
            self._start_loading(version)

    def _start_loading(self, version: int) -> None:
        """From here on the engine can't act until all weights have been loaded."""
        self._awaited = set(self._announced)
        self._missing = f"the sync to version {version} has not ended"
        self.prepare_loading(set(self._announced))

    def update_weights(self, message: dict[str, Any]) -> None:
        """Load or keep one message of a sync; one that fails ends the sync, unless it only has to be sent again."""
        if self._syncing is None:
            raise VlarlError("no sync is in progress that the weights could belong to: start one")
        try:
            self._awaited -= self.load(message) if self._staged is None else self._keep(message, self._staged)
        except DamagedBucketError:
            raise
        except BaseException:
            self.abandon_sync()
            raise

    def _keep(self, message: dict[str, Any], staged: list[dict[str, Any]]) -> set[str]:
        payload, names = self.bucket_of(message)
        staged.append(bucket_message(payload, checksum=False))  # not verified once more at the end
        return names

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
        if self._staged is not None:
            self._load_staged(version, self._staged)
        self.finish_loading(version)
        self._syncing, self._missing = None, ""
        self._required.clear()
        self.version = version

    def _load_staged(self, version: int, staged: list[dict[str, Any]]) -> None:
        """Load what has been kept, as a direct sync would have; each bucket is freed when it is loaded."""
        self._staged = None
        self._start_loading(version)
        staged.reverse()
        while staged:
            self.update_weights(staged.pop())

    def abandon_sync(self) -> None:
        """Abandon a sync that can't be finished. After a direct one the engine acts again when another has brought all
        of its weights; a staged one has changed nothing."""
        if self._syncing is None:
            return
        if self._staged is not None:
            self._syncing = self._staged = None
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
