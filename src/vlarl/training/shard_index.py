"""Reads the index of a sharded checkpoint. torch.distributed.checkpoint stores it as a pickle, which can run any code
when it is loaded; here only the library's own records of tensors are created from it.

Stored objects that are not tensors are refused too: the library would load them as pickles.
"""

from __future__ import annotations

import importlib
import pickle
import struct
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

_RECORDS = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
_BUILD: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]  # sets the attributes of an object


class IndexUnpickler(pickle._Unpickler):  # in Python: the C version has no hook for setting attributes
    """An unpickler that allows the records of an index, torch's names of types, and nothing else.

    It sets the fields of records and no other attribute: an attribute of a class would affect the whole process.
    """

    stack: list[Any]
    ALLOWED: ClassVar[dict[str, frozenset[str]]] = {
        _RECORDS: frozenset(
            {
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            }
        ),
        _STORAGE: frozenset({"_StorageInfo"}),
        "torch": frozenset({"Size"}),
        "torch.serialization": frozenset({"_get_layout"}),  # a lookup in a table of layouts
        "collections": frozenset({"OrderedDict"}),
        "pathlib": frozenset({"Path", "PosixPath", "PurePosixPath"}),
    }

    def find_class(self, module: str, name: str) -> Any:
        """The named record or type; anything else is refused by its name."""
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module == "pathlib._local":  # the name in Python 3.13 only
            module = "pathlib"
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it would call {module}.{name}, which no index needs: it is not loaded")
        return getattr(importlib.import_module(module), name)

    def load_build(self) -> None:
        """Set the fields of a record."""
        state, record = self.stack[-1], self.stack[-2]
        if isinstance(record, type) or not is_dataclass(record):
            name = getattr(record, "__qualname__", type(record).__name__)
            raise pickle.UnpicklingError(f"it would change {name}, which is not a record of an index")
        if not hasattr(type(record), "__setstate__"):
            names = {field.name for field in fields(record)}
            if not isinstance(state, dict) or not names.issuperset(state):
                raise pickle.UnpicklingError(f"it would set more than the fields of a {type(record).__name__}")
        _BUILD(self)

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


class ShardReader(FileSystemReader):
    """The library's reader of a folder, with an index that can't run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; UnpicklingError if it refers to anything but tensors in files of this folder."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            index = read_index(file)
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def read_index(file: Any) -> Metadata:
    """The index in an open file; refused unless it refers only to tensors in its folder."""
    try:
        index = IndexUnpickler(file).load()
    except (LookupError, OverflowError, MemoryError, RuntimeError, struct.error) as error:
        raise pickle.UnpicklingError(f"it is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(index, Metadata) or not isinstance(index.state_dict_metadata, dict):
        raise pickle.UnpicklingError("it is not an index")
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{key!r} is not a tensor: it would be loaded as a pickle, which can run code")
    for entry in (index.storage_data or {}).values():
        if PurePath(entry.relative_path).name != entry.relative_path:
            raise pickle.UnpicklingError(f"it names the file {entry.relative_path!r}, which is not in its folder")
    return index
