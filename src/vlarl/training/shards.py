"""A sharded learner's checkpoint: each rank writes its parts with torch.distributed.checkpoint, and any number of
ranks, or one process, can read them.

It contains only what is trained (weights, optimizer state, averages, a separate critic); the rest is what the run
started from. The library's index of the parts is a pickle, which shard_index.py reads without running code.
"""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from vlarl.errors import VlarlError
from vlarl.training.ranks import Ranks
from vlarl.training.shard_index import ShardReader

FOLDER = "sharded"
WEIGHTS, OPTIMIZER = "weights", "optimizer"  # prefixes of keys, before the parameter's name


def is_sharded(checkpoint: Path) -> bool:
    """Whether the trainer's state is stored in parts."""
    return (checkpoint / FOLDER).is_dir()


def is_of_rank(name: str, ranks: Ranks) -> bool:
    """Whether this rank verifies a checkpoint's file: a part, named `__RANK_N.distcp`, is verified by the rank that
    wrote it or, with fewer ranks, by those that exist in turn; every other file by rank 0."""
    part = re.fullmatch(rf"{FOLDER}/__(\d+)_\d+\.distcp", name)
    return (int(part[1]) if part else 0) % ranks.world_size == ranks.rank


def write_shards(tensors: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Write this rank's parts of these tensors; all ranks must call, and all fail if one does."""
    try:
        save(tensors, storage_writer=FileSystemWriter(checkpoint / FOLDER))
    except CheckpointException as error:  # not a subclass of Exception
        message = f"cannot write {checkpoint}: {_reason(error)}: free some space, then continue with --resume"
        raise VlarlError(message) from None


def stored_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the full tensors. OSError if the index can't be read."""
    try:
        index = ShardReader(checkpoint / FOLDER).read_metadata().state_dict_metadata
        return {key: tuple(entry.size) for key, entry in index.items() if isinstance(entry, TensorStorageMetadata)}
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise OSError(f"the index of {checkpoint / FOLDER} can't be read ({error})") from error


def read_shards(into: dict[str, torch.Tensor], checkpoint: Path, ranks: Ranks) -> None:
    """Fill these tensors, or this rank's parts of them, with what is stored under their keys."""
    filled: dict[str, Any] = dict(into)
    reader = ShardReader(checkpoint / FOLDER)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended with one process
            load(filled, storage_reader=reader, no_dist=ranks.world_size == 1)
    except CheckpointException as error:
        raise OSError(_reason(error)) from None


def _reason(error: CheckpointException) -> str:
    """The first failed rank's error in one line; the library's own text has a traceback of each."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"rank {rank}: {cause or type(cause).__name__}"
