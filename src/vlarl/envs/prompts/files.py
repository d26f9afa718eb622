"""Rows of data files: JSON lines, Parquet, and folders that Hugging Face datasets saved.

A file is opened once; a row is parsed when it is used. Arrow files are mapped into memory, Parquet files are read.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from pathlib import Path
from typing import Any

from vlarl.envs.prompts.source import PromptError
from vlarl.errors import MissingExtraError, UsageError
from vlarl.json_files import parse_json, read_json

Row = dict[str, Any]


class RowFile(ABC):
    """Rows, by index from 0."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Row:
        """The columns of a row by name; PromptError where it can't be read."""

    @property
    def folder(self) -> Path:
        """The folder that paths of images are relative to."""
        return self.path if self.path.is_dir() else self.path.parent

    def where(self, index: int) -> str:
        """A row in messages; rows count from 0."""
        return f"{self.path}, row {index}"


class JsonLines(RowFile):
    """One JSON object in each line that is not empty."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._starts = array("Q")
        position = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._starts.append(position)
                position += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row:
        """The object of a line."""
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        try:
            content = parse_json(line)
        except ValueError as error:
            raise PromptError(f"{self.where(index)} is not valid JSON ({error}): correct the line.") from None
        if not isinstance(content, dict):
            raise PromptError(f"{self.where(index)} is not a JSON object with columns: correct the line.")
        return content


class ArrowTable(RowFile):
    """A table of pyarrow."""

    def __init__(self, path: Path, table: Any) -> None:
        super().__init__(path)
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Row:
        """The values of a row as Python objects."""
        (row,) = self._table.slice(index, 1).to_pylist()
        return dict(row)


def open_rows(path: Path, option: str = "prompts.path") -> RowFile:
    """The rows of a file or folder that an option names; UsageError where there is none, or its kind is not known."""
    if not path.exists():
        raise UsageError(f"{option}: there is no file {path}.")
    if path.is_dir():
        return _saved_dataset(path, option)
    if path.suffix in (".jsonl", ".ndjson"):
        found: RowFile = JsonLines(path)
    elif path.suffix == ".parquet":
        found = ArrowTable(path, _read(path, option, lambda: _arrow("parquet").read_table(path)))
    else:
        raise UsageError(
            f"{option}: {path} has an unknown kind; use .jsonl with one JSON object a line, .parquet, or a folder "
            "that save_to_disk of Hugging Face datasets wrote."
        )
    if not len(found):
        raise UsageError(f"{option}: {path} has no rows.")
    return found


def _saved_dataset(path: Path, option: str) -> RowFile:
    """The rows of a folder that `save_to_disk` wrote."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(each.parent.name for each in path.glob("*/state.json"))
        raise UsageError(f"{option}: {path} holds several splits; name one of {', '.join(splits)} in it.")
    state = path / "state.json"
    try:
        names = [each["filename"] for each in read_json(state)["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"{option}: {path} is not a folder that save_to_disk of Hugging Face datasets wrote: it has no valid "
            "state.json."
        ) from None
    arrow = _arrow()
    tables = [_read(path / name, option, lambda file=path / name: _mapped(arrow, file)) for name in names]
    table = arrow.concat_tables(tables) if tables else None
    if table is None or not table.num_rows:
        raise UsageError(f"{option}: {path} has no rows.")
    return ArrowTable(path, table)


def _mapped(arrow: Any, file: Path) -> Any:
    return arrow.ipc.open_stream(arrow.memory_map(str(file))).read_all()


def _read(path: Path, option: str, read: Any) -> Any:
    """A table, with the library's own error in our words."""
    try:
        return read()
    except (OSError, ValueError) as error:  # pyarrow's errors derive from them
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{option}: {path} can't be read ({reason}): check that the file is whole.") from error


def _arrow(part: str | None = None) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "data") from None
    return pyarrow.parquet if part == "parquet" else pyarrow


def as_json(value: Any) -> str:
    """A value in messages, shortened."""
    return json.dumps(value, default=repr, ensure_ascii=False)[:80]
