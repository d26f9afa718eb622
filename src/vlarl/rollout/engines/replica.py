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

from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.errors import VlarlError
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.weights.stream import check_complete, check_shapes, checkpoint_name


class ReplicaEngine(TorchEngine):
    """The torch engine on a copy of the policy."""

    def __init__(
        self, policy: OpenVLAPolicy, device: torch.device, batch_size: int | None = None, cuda_graphs: bool = True
    ) -> None:
        """Folds the policy's adapters into its weights: what learners send is folded, too."""
        if policy.has_adapter:
            policy.fold_adapter()
        super().__init__(policy.eval(), device, batch_size, cuda_graphs)
        named = ((checkpoint_name(name), parameter) for name, parameter in policy.named_parameters())
        self._weights = {name: parameter.detach() for name, parameter in named if name is not None}
        self._syncing: int | None = None  # the version of the current sync
        self._awaited: set[str] = set()  # weights that it announced and that have not arrived yet
        self._partial = False  # a sync ended halfway: only a sync of all weights fixes that

    def generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """Sample a decision for each row, from its own seed whatever else is in the batch; temperature 0 is greedy."""
        if self._syncing is not None or self._partial:
            raise VlarlError("the engine can't act: its last sync has not ended. Sync it, or replace it.")
        return super().generate(inputs, sampling, seeds)

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
        """Start a sync of weights with these names and shapes; what doesn't fit is refused before anything changes."""
        if self._syncing is not None:
            raise VlarlError(f"version {version} can't be loaded: the sync to version {self._syncing} has not ended")
        own = {name: tuple(weight.shape) for name, weight in self._weights.items()}
        check_shapes(shapes, own, whole=self._partial)
        self._syncing, self._awaited = version, set(shapes)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one message of a sync; one that fails ends the sync."""
        if self._syncing is None:
            raise VlarlError("no sync is in progress that the weights could belong to: start one")
        try:
            self._load(update_info["payload"], update_info["checksum"])
        except BaseException:
            self.abandon_sync()
            raise

    @torch.no_grad()
    def _load(self, payload: bytes, checksum: int | None) -> None:
        if checksum is not None and zlib.crc32(payload) != checksum:
            raise VlarlError(f"a bucket of {len(payload)} bytes arrived damaged: sync again")
        tensors = load(payload)
        if surplus := tensors.keys() - self._awaited:
            raise VlarlError(f"{min(surplus)} was not announced for the sync to version {self._syncing}: sync again")
        for name, tensor in tensors.items():
            self._weights[name].copy_(tensor)
        self._awaited -= tensors.keys()

    def finish_sync(self, version: int) -> None:
        """Act with the new weights from now on."""
        if self._syncing != version:
            raise VlarlError(f"version {version} was not started: the sync in progress is to version {self._syncing}")
        check_complete(self._awaited, version)
        self.policy.weights_changed()
        self._syncing, self._partial = None, False
        self.version = version

    def abandon_sync(self) -> None:
        """Abandon a sync that can't be finished; the engine acts again after one that brings all weights."""
        self._partial = self._partial or self._syncing is not None
        self._syncing = None
