"""Writing and reading the files of a run so that neither a crash nor a full disk leaves a partial file."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlarl.errors import VlarlError
from vlarl.json_files import parse_json

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a failure to write `path` into a message that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise VlarlError(full_disk(path)) from error
        remedy = f"{error.strerror or error}: check the disk and the folder's permissions, then continue with --resume"
        raise VlarlError(f"cannot write {path}: {remedy}") from error


def is_full(error: OSError) -> bool:
    """Whether a disk, or the quota on it, is full."""
    return error.errno in _DISK_FULL


def full_disk(path: Path | str) -> str:
    """The message for a disk that has no space left for a file."""
    folder = Path(path).parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        free = f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB free in {folder}"
    except OSError:
        free = f"no space left in {folder}"
    return f"cannot write {path}: the disk is full ({free}): free some space, then continue with --resume"


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing: a reader, or a crash, sees the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                # Without this a power cut may keep the rename and lose the content.
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file; a line that a killed process left unfinished is skipped."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = parse_json(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row
