"""Reads JSON from untrusted sources: a pipe does not hang, and endless nesting is reported as invalid JSON."""

import errno
import json
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a text; ValueError if it is not valid JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> Any:
    """The value in a file: OSError if it can't be read, ValueError if it is not valid JSON."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return parse_json(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty if the file can't be read or holds no object."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
