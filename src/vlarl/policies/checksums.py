"""checksums.json: size and CRC-32 of a checkpoint's weight files, written with them and compared when they are read.

A bit flipped by a disk or a copy usually leaves the weights finite and the policy silently worse. The check takes about
0.3 s per GiB. Files that the list does not name are not checked, so configuration and statistics may be edited.
`is_wanted` selects file names, so that several processes can each check a part of them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from vlarl.json_files import read_json

TRAINER_FILE = "trainer.safetensors"  # beside a policy whose training can be resumed; read and checked by the trainer
FILE_NAME = "checksums.json"
SUFFIXES = (".safetensors", ".distcp")
READ_BYTES = 1 << 22  # at a time


def checksums(folder: Path, is_wanted: Callable[[str], bool]) -> dict[str, list[int]]:
    """Size and CRC-32 of the weight files in a folder and its subfolders."""
    files = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    names = (path.relative_to(folder).as_posix() for path in files)
    return {name: _checksum(folder / name) for name in names if is_wanted(name)}


def write_checksums(folder: Path, listed: Mapping[str, list[int]]) -> None:
    """Write the list into a folder, unless it is empty."""
    if listed:
        text = json.dumps(dict(sorted(listed.items())), indent=2)
        (folder / FILE_NAME).write_text(f"{text}\n", encoding="utf-8")


def verify_checksums(folder: Path, is_wanted: Callable[[str], bool]) -> None:
    """Raise ValueError for a file that has changed since it was written; a folder without a list is not checked."""
    if not (folder / FILE_NAME).is_file():
        return
    try:
        listed = read_json(folder / FILE_NAME)
        wanted = {str(name): (int(size), int(crc)) for name, (size, crc) in listed.items() if is_wanted(str(name))}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / FILE_NAME} can't be read ({error}): copy the checkpoint again") from error
    for name, expected in wanted.items():
        path = folder / name
        if not path.exists():
            raise ValueError(
                f"{path} is missing, and {FILE_NAME} lists it. Copy it again, or use another checkpoint; delete "
                f"{FILE_NAME} if you removed it yourself"
            )
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            continue  # a folder is refused when it is read, and a link may point into a cache
        if path.stat().st_size != expected[0] or _checksum(path) != list(expected):
            raise ValueError(
                f"{path} is not what was written, by its checksum in {FILE_NAME}. Copy it again, or use another "
                f"checkpoint; delete {FILE_NAME} if you changed the weights yourself"
            )


def _checksum(path: Path) -> list[int]:
    size = crc = 0
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            size += len(part)
            crc = zlib.crc32(part, crc)
    return [size, crc]
