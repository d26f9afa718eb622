"""Makes text from files, instructions and other programs safe to print on a terminal."""

from __future__ import annotations

import re

_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, moves of the cursor
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # titles, links, the clipboard
    r"|\x9b[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]?"
)
# Control characters except tab and line feed; marks that change the direction of the following text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text without terminal escapes and control characters; lines and tabs stay."""
    return _CONTROLS.sub("", _SEQUENCES.sub("", text))
