"""JSON files of a checkpoint, and the sizes in them, which may be damaged or hostile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlarl import json_files

LARGEST_SIZE = 1 << 40  # for sizes that the weight files bound as well


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; the error for a broken file names it."""
    try:
        content = json_files.read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object in the format of the original layout's files."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def whole(value: Any, name: str, low: int, high: int = LARGEST_SIZE) -> int:
    """An integer within its bounds; ValueError with its name for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or not low <= value <= high:
        raise ValueError(f"{name} is {str(value)[:40]!r}, which must be a whole number from {low} to {high}")
    if int(value) != value:
        raise ValueError(f"{name} is {value!r}, which must be a whole number from {low} to {high}")
    return int(value)
