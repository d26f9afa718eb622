"""Names of what environment workers have left in the object store: the driver passes them on and reads nothing.

    environments ── process ──► store of their machine ◄── rows ── engines (a batch), ranks (a microbatch)
         └── StoredBatch(name, rows) ──► driver ── PickedRows of names ──►┘

What is read is copied out, and the object is let go at once: Ray can't spill or free what a process still maps. The
objects are results of calls of the driver's. It owns them: they are freed when it drops the last name, and are lost
only with the machine that holds them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import ray
import torch
from ray import exceptions

from vlarl.decisions import TensorRows
from vlarl.distributed.actor import store_errors
from vlarl.errors import RowsLostError
from vlarl.types import Observation, Trajectory

MAPPED_BYTES = 32 << 20  # of objects that one call reads at once


@dataclass(frozen=True)
class StoredBatch(TensorRows):
    """A batch in the object store."""

    reference: Any  # Ray's name of it
    num_rows: int
    row_lengths: tuple[int, ...] | None  # as `lengths`
    machine: str  # Ray's id of the node that it was made on
    num_bytes: int = 0  # of the object, about

    def __len__(self) -> int:
        return self.num_rows

    @property
    def lengths(self) -> torch.Tensor | None:
        """[B] how long each row is; None where all rows are alike."""
        return None if self.row_lengths is None else torch.tensor(self.row_lengths)

    def carried(self, index: int) -> tuple[TensorRows, int]:
        """The name and the index: the rows stay where they are."""
        return self, index

    def prefetch(self, index: torch.Tensor) -> None:
        """Let the object come to this machine, and continue meanwhile."""
        start_fetching([self.reference])

    def gone(self, missed: str) -> bool:
        """Whether this is the object that was missed, or its machine is gone."""
        return self.reference.hex() == missed or self.machine not in machines_alive()

    def rows(self, index: torch.Tensor | slice) -> TensorRows:  # type: ignore[override]
        """The chosen rows, in memory of this process."""
        chosen = torch.arange(self.num_rows)[index]
        return self.rows_of([(self, chosen)])[0]

    @classmethod
    def rows_of(cls, picked: Sequence[tuple[Self, torch.Tensor]]) -> list[TensorRows]:
        """The same of several batches, which are fetched side by side. Few of them are mapped at once: a store must
        hold those."""
        rows: list[TensorRows] = []
        groups = _groups(picked)
        if len(groups) > 1:
            start_fetching([batch.reference for batch, _ in picked])
        for group in groups:
            batches: list[TensorRows] = fetched([batch.reference for batch, _ in group])
            rows += [batch.rows(index) for batch, (_, index) in zip(batches, group, strict=True)]  # an index copies
        return rows


def _groups(picked: Sequence[tuple[StoredBatch, torch.Tensor]]) -> list[list[tuple[StoredBatch, torch.Tensor]]]:
    """In their order, up to MAPPED_BYTES together."""
    groups: list[list[tuple[StoredBatch, torch.Tensor]]] = []
    size = 0
    for each in picked:
        size += each[0].num_bytes
        if not groups or size > MAPPED_BYTES:
            groups.append([])
            size = each[0].num_bytes
        groups[-1].append(each)
    return groups


@dataclass(frozen=True)
class StoredObservation:
    """An observation with its pixels, as one of a list in the object store."""

    reference: Any
    index: int

    def __call__(self) -> Observation:
        """Fetch it."""
        observations: list[Observation] = fetched([self.reference])[0]
        return copy.deepcopy(observations[self.index])  # out of the store's memory


def machines_alive() -> set[str]:
    """Ray's ids of the nodes that are alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def readable(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Those of the episodes whose rows are on machines that are alive."""
    alive = machines_alive()

    def is_there(trajectory: Trajectory) -> bool:
        rows = [*(t.inputs for t in trajectory.transitions), trajectory.final_observation.inputs]
        batches = (row.batch for row in rows if row is not None)
        return all(batch.machine in alive for batch in batches if isinstance(batch, StoredBatch))

    return [trajectory for trajectory in trajectories if is_there(trajectory)]


def start_fetching(references: Sequence[Any]) -> None:
    """Let these objects come to this machine, and continue meanwhile."""
    if references:
        ray.wait(list(references), num_returns=len(references), timeout=0, fetch_local=True)


def fetched(references: Sequence[Any]) -> list[Any]:
    """What these names are of: views of the store's memory, to be copied from and dropped."""
    try:
        with store_errors():
            found: list[Any] = ray.get(list(references))
    except exceptions.ObjectLostError as error:
        raise RowsLostError(
            "processed observations are lost with the machine that they were made on "
            f"({type(error).__name__} of {error.object_ref_hex})",
            error.object_ref_hex,
        ) from None
    return found
