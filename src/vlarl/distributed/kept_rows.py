"""Rows that a rank reads in an update, in its memory: each object comes to it once, whatever the order of the rows.

    schedule ── rows of this rank's microbatches ──► kept_rows ──► KeptRows ◄── microbatch by microbatch ── learner
                                                                      └── what is missing, by name ──► stored_rows

Microbatches take rows in random order, so nearly each of them has a row of nearly each object. A machine whose store
can't hold all objects would fetch each of them for every microbatch, after a call to the driver, their owner, to learn
where it is. So the first time that an object is fetched, all of its rows that this rank will read are copied out of it.
What is beyond the limit of memory is fetched again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vlarl.decisions import PickedRows, TensorRows
from vlarl.distributed.stored_rows import StoredBatch, start_fetching
from vlarl.observability.machine import available_memory

LARGEST_PART = 0.25  # of the memory that is free on a machine, for all of its ranks


@dataclass
class Keeper:
    """The rows that are here already."""

    expected: Mapping[int, torch.Tensor]  # by the index of a batch: which of its rows will be read, in ascending order
    limit: int  # bytes
    num_bytes: int = 0  # of what is kept
    kept: dict[int, TensorRows] = field(default_factory=dict)  # the expected rows, by the index of their batch

    def has(self, which: int, index: torch.Tensor) -> bool:
        """Whether these rows of a batch are here."""
        return which in self.kept and bool(torch.isin(index, self.expected[which]).all())

    def reserve(self, which: int, batch: StoredBatch, index: torch.Tensor) -> torch.Tensor:
        """Which rows to fetch, where these are needed: all that are expected, as far as memory allows."""
        expected = self.expected.get(which)
        if expected is None or which in self.kept or not bool(torch.isin(index, expected).all()):
            return index
        size = batch.num_bytes * len(expected) // batch.num_rows
        if self.num_bytes + size > self.limit:
            return index
        self.num_bytes += size
        return expected

    def rows(self, which: int, index: torch.Tensor) -> TensorRows:
        """Rows that are here."""
        return self.kept[which].rows(torch.searchsorted(self.expected[which], index))


@dataclass(frozen=True)
class KeptRows(PickedRows):
    """Rows of stored batches, of which some are in memory."""

    keeper: Keeper

    def parts(self, picked: Sequence[tuple[int, torch.Tensor]]) -> list[TensorRows]:
        """The rows with these indices of some of the batches; those that are fetched are kept."""
        missing = [(which, index) for which, index in picked if not self.keeper.has(which, index)]
        wanted = [self.keeper.reserve(which, self._stored(which), index) for which, index in missing]
        stored = [(self._stored(which), rows) for (which, _), rows in zip(missing, wanted, strict=True)]
        passing: dict[int, TensorRows] = {}
        for (which, index), rows, found in zip(missing, wanted, StoredBatch.rows_of(stored), strict=True):
            if rows is index:
                passing[which] = found
            else:
                self.keeper.kept[which] = found
        return [passing[which] if which in passing else self.keeper.rows(which, index) for which, index in picked]

    def prefetch(self, index: torch.Tensor) -> None:
        """Let the objects of the rows that are read next come to this machine, unless the rows are here."""
        which = self.batch[index]
        coming = [n for n in sorted(set(which.tolist())) if not self.keeper.has(n, self.index[index[which == n]])]
        start_fetching([self._stored(batch).reference for batch in coming])

    def _stored(self, which: int) -> StoredBatch:
        batch = self.batches[which]
        assert isinstance(batch, StoredBatch)
        return batch


def kept_rows(inputs: TensorRows, own: torch.Tensor, limit: int) -> TensorRows:
    """The same rows, of which those with the indices `own` are kept once they are fetched; `limit` in bytes."""
    if not isinstance(inputs, PickedRows) or not all(isinstance(batch, StoredBatch) for batch in inputs.batches):
        return inputs
    own = torch.from_numpy(np.unique(own.numpy()))
    order = own[torch.argsort(inputs.batch[own], stable=True)]  # the rows of a batch follow each other
    present, counts = np.unique(inputs.batch[own].numpy(), return_counts=True)
    indices = torch.split(inputs.index[order], counts.tolist())
    expected = {which: index.sort().values for which, index in zip(present.tolist(), indices, strict=True)}
    # copies: the originals are part of an object of the store, which would stay mapped as long as they are used
    batch, index = inputs.batch.clone(), inputs.index.clone()
    lengths = None if inputs.row_lengths is None else inputs.row_lengths.clone()
    return KeptRows(inputs.batches, batch, index, lengths, Keeper(expected, limit))


def memory_limit(ranks_here: int) -> int:
    """Bytes of rows that one of so many ranks of this machine keeps."""
    free = available_memory()
    return 0 if free is None else int(free * LARGEST_PART) // ranks_here
