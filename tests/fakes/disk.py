"""The disk as a program uses it: what was done to it in which order, and a power cut at any point."""

import os
from pathlib import Path

import pytest

CHANGES = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "fsync")


class PowerCutError(BaseException):
    """The machine is off: no `except Exception` notices."""


class Disk:
    """Wraps the functions of `os` that change the disk. From the `cut_at`-th change on nothing happens any more, not even
    what the program does to clean up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cut_at: int | None = None) -> None:
        self.log: list[tuple[str, str]] = []  # what was done, to which file's name
        self._cut_at = cut_at
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def change(self, what: str, path: str) -> None:
        """Note a change before it happens; raises where the power is cut."""
        if self._cut_at is not None and len(self.log) >= self._cut_at:
            raise PowerCutError
        self.log.append((what, path))

    def _watched(self, name, function):
        def watched(path, *arguments, **named):
            self.change(name, os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path))
            return function(path, *arguments, **named)

        return watched

    def places(self, what: str, path: Path | str) -> list[int]:
        """When this was done to this path, counted in changes."""
        return [place for place, entry in enumerate(self.log) if entry == (what, str(path))]
