"""A torch engine with weights of its own, which a learner in another process sends.

    learner ── start_sync, update_weights …, finish_sync ──► ReplicaEngine ──► its policy's parameters

The calls are those of `VllmEngine`, so that a sync is the same for both: names and shapes first, then buckets.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load

from vlarl.errors import VlarlError
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.types import ActionTokens, PolicyInput
from vlarl.weights.stream import check_shapes, check_whole, checkpoint_name


class ReplicaEngine(TorchEngine):
    """The torch engine on a copy of the policy."""

    def __init__(
        self, policy: OpenVLAPolicy, device: torch.device, batch_size: int | None = None, cuda_graphs: bool = True
    ) -> None:
        """Adapters of the policy are folded into it: what learners send is folded, too."""
        if policy.has_adapter:
            policy.fold_adapter()
        super().__init__(policy.eval(), device, batch_size, cuda_graphs)
        named = ((checkpoint_name(name), parameter) for name, parameter in policy.named_parameters())
        self._places = {name: parameter.detach() for name, parameter in named if name is not None}
        self._syncing: int | None = None  # the version that a sync is bringing
        self._awaited: set[str] = set()  # the weights that it has announced and not brought yet
        self._torn = False  # a sync ended halfway: only all weights together can mend it

    def generate(self, inputs: PolicyInput, temperature: float, seeds: Sequence[int]) -> ActionTokens:
        """Sample action tokens, each row from its own seed whatever else is in the batch; temperature 0 is greedy."""
        if self._syncing is not None or self._torn:
            raise VlarlError("the engine can't act: its last sync has not ended. Sync it, or replace it.")
        return super().generate(inputs, temperature, seeds)

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
        """Begin to take weights of these names and shapes; what doesn't fit is refused before anything changes."""
        if self._syncing is not None:
            raise VlarlError(f"version {version} can't be taken: the sync to version {self._syncing} has not ended")
        own = {name: tuple(place.shape) for name, place in self._places.items()}
        check_shapes(shapes, own, whole=self._torn)
        self._syncing, self._awaited = version, set(shapes)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take one message of a sync; one that fails ends the sync."""
        if self._syncing is None:
            raise VlarlError("no sync is under way that weights could be part of: start one")
        try:
            self._take(update_info["payload"], update_info["checksum"])
        except BaseException:
            self.abandon_sync()
            raise

    @torch.no_grad()
    def _take(self, payload: bytes, checksum: int | None) -> None:
        if checksum is not None and zlib.crc32(payload) != checksum:
            raise VlarlError(f"a bucket of {len(payload)} bytes came damaged: sync again")
        tensors = load(payload)
        if surplus := tensors.keys() - self._awaited:
            raise VlarlError(f"{min(surplus)} was not announced for the sync to version {self._syncing}: sync again")
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor)
        self._awaited -= tensors.keys()

    def finish_sync(self, version: int) -> None:
        """Act with the new weights from now on."""
        if self._syncing != version:
            raise VlarlError(f"version {version} was not begun: the sync under way is to version {self._syncing}")
        check_whole(self._awaited, version)
        self.policy.weights_changed()
        self._syncing, self._torn = None, False
        self.version = version

    def abandon_sync(self) -> None:
        """Give up a sync that can't be finished; the engine acts again after one that brings all weights."""
        self._torn = self._torn or self._syncing is not None
        self._syncing = None
