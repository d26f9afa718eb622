"""The parts of a dataset that grows while a policy is trained: which files and episodes each training iteration added.

A part's files are never changed again. A grown dataset is a new folder with links to them, which takes the place of the
old one when it is complete; and one that has to lose its last parts, since training resumes from before them, is made
in the same way.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vlarl.errors import UsageError
from vlarl.json_files import read_json

PARTS = "vlarl_parts.json"


@dataclass(frozen=True)
class Part:
    """Where the episodes of a training iteration end."""

    iteration: int
    files: int  # of steps, in this part and in those before it
    episodes: int  # in this part and in those before it


def read_parts(folder: Path) -> list[Part]:
    """The parts of a dataset, in their order; none of one that was written at once."""
    path = folder / PARTS
    if not path.exists():
        return []
    content = read_json(path)
    try:
        parts = [Part(**{name: int(row[name]) for name in Part.__dataclass_fields__}) for row in content]
        for one, other in zip([Part(0, 0, 0), *parts], parts, strict=False):
            if not (one.iteration < other.iteration and one.files <= other.files and one.episodes <= other.episodes):
                raise ValueError("parts do not follow each other")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} is malformed ({error}): move the dataset {folder} away; episodes are then saved into a new one."
        ) from error
    return parts


def write_parts(folder: Path, parts: Sequence[Part]) -> None:
    """Write the parts of a dataset, if it has any."""
    if parts:
        content = [asdict(part) for part in parts]
        (folder / PARTS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def last_part(parts: Sequence[Part], iteration: int) -> Part | None:
    """The last part up to an iteration; None where there is none."""
    return next((part for part in reversed(parts) if part.iteration <= iteration), None)


def link_or_copy(source: Path, target: Path) -> None:
    """The same file under another name; a copy on disks without links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def aside(folder: Path) -> Path:
    """Where the old dataset is, for a moment, while the new one takes its place."""
    return folder.with_name(f".{folder.name}.old")


def swap(partial: Path, folder: Path) -> None:
    """Let a complete dataset take the place of the one that has its name, if there is one."""
    shutil.rmtree(aside(folder), ignore_errors=True)
    if folder.exists():
        folder.rename(aside(folder))
    partial.rename(folder)
    shutil.rmtree(aside(folder), ignore_errors=True)


def recover(folder: Path) -> None:
    """Bring the old dataset back where a process was killed while the new one took its place."""
    if aside(folder).exists() and not folder.exists():
        aside(folder).rename(folder)
