"""The Parquet files of a LeRobot dataset: columns as arrays, and encoded images by row."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.data.lerobot.info import AGAIN, Feature
from vlarl.errors import MissingExtraError, UsageError
from vlarl.types import IntArray


def arrow() -> Any:
    """pyarrow, with its module for Parquet loaded."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "data") from None
    return pyarrow


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file in the library's errors."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, MemoryError) as error:  # pyarrow's errors derive from them
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise UsageError(f"{path} can't be read ({reason}): {AGAIN}.") from error


def parquet_file(path: Path) -> Any:
    """An open file, whose checksums are verified where it has them."""
    return arrow().parquet.ParquetFile(path, page_checksum_verification=True)


def read_table(path: Path, columns: Sequence[str] | None = None) -> Any:
    """A whole table; UsageError names the file if it is damaged or lacks one of the columns."""
    refuse_missing(path)
    with reading(path):
        file = parquet_file(path)
        if missing := sorted(set(columns or ()) - set(file.schema_arrow.names)):
            raise ValueError(f"it has no column {', '.join(missing)}")
        return file.read(columns=None if columns is None else list(columns))


def refuse_missing(path: Path) -> None:
    """Refuse what is not a file; opening a pipe would wait for ever."""
    if not path.is_file():
        raise UsageError(f"{path} is {'not a file' if os.path.lexists(path) else 'missing'}: {AGAIN}.")


class StepsFile:
    """One file of steps: the columns of all features that are not videos."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()  # one reader at a time; decoding happens elsewhere
        refuse_missing(path)
        with reading(path):
            self._file = parquet_file(path)
            metadata = self._file.metadata
            sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        self._group_starts: IntArray = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self._group_starts[-1])

    @cached_property
    def names(self) -> frozenset[str]:
        """The columns of the file."""
        return frozenset(self._file.schema_arrow.names)

    def _column(self, name: str, groups: Sequence[int] | None = None) -> Any:
        """A column as one array of pyarrow."""
        with self._lock, reading(self.path):
            if name not in self.names:
                raise ValueError(f"it has no column {name}")
            chosen = range(self._file.num_row_groups) if groups is None else groups
            column = self._file.read_row_groups(list(chosen), columns=[name]).column(name)
            if column.null_count:
                raise ValueError(f"{name} has empty values")
            return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)

    def values(self, name: str, feature: Feature) -> NDArray[Any]:
        """[N, …] the values of a feature in all steps of the file."""
        column = self._column(name)
        pyarrow = arrow()
        types = pyarrow.types
        with reading(self.path):
            if isinstance(column, pyarrow.ExtensionArray):
                column = column.storage
            while (
                types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
            ):
                column = column.flatten()
            if column.null_count:
                raise ValueError(f"{name} has empty values")
            if types.is_nested(column.type) or types.is_string(column.type) or types.is_binary(column.type):
                raise ValueError(f"{name} holds {column.type}, and info.json says {feature.dtype}")
            flat = column.to_numpy(zero_copy_only=False)
            shape = (len(self), *feature.field().shape)
            if flat.size != int(np.prod(shape)):
                raise ValueError(
                    f"{name} has {flat.size:,} values, and its shape in info.json needs {np.prod(shape):,}"
                )
            values: NDArray[Any] = flat.astype(feature.dtype).reshape(shape)
            if feature.field().is_float and not np.isfinite(values).all():
                raise ValueError(f"{name} holds NaN or infinity in row {np.argwhere(~np.isfinite(values))[0][0]}")
            return values

    def texts(self, name: str) -> list[str]:
        """The texts of a feature in all steps of the file."""
        column = self._column(name)
        with reading(self.path):
            return [str(text) for text in column.to_pylist()]

    def group_of(self, row: int) -> int:
        """The group of rows, read at once, in which a row is."""
        return int(np.searchsorted(self._group_starts, row, side="right")) - 1

    def first_row(self, group: int) -> int:
        """The first row of a group."""
        return int(self._group_starts[group])

    def encoded_images(self, name: str, group: int) -> list[bytes]:
        """The images of a group of rows, as they are stored."""
        column = self._column(name, [group])
        with reading(self.path):
            if not arrow().types.is_struct(column.type) or column.type.get_field_index("bytes") < 0:
                raise ValueError(f"{name} holds {column.type}, and not images")
            images = column.field("bytes")
            if images.null_count:
                raise ValueError(f"{name} names files of images in place of the images themselves")
            return [bytes(image) for image in images.to_pylist()]
