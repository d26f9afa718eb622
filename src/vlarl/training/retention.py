"""Which periodic checkpoints of a run are kept: the newest ones, by number and by size."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from vlarl.config.run_checkpoints import PERIODIC

log = logging.getLogger(__name__)

GIB = 2**30


def retire(folder: Path, keep: int, max_total_gib: float | None = None) -> None:
    """Remove the oldest periodic checkpoints: at most `keep` stay, and fewer while all checkpoints take too much space.

    The newest periodic one always stays, and so do those of other names, such as `final`. Call it after a checkpoint
    has its final name and is on disk: then a crash at any time leaves the newest one complete.
    """
    periodic = sorted(folder.glob(f"{PERIODIC}*"))
    for path in periodic[:-keep]:
        shutil.rmtree(path)
    if max_total_gib is None:
        return
    kept, total = periodic[-keep:], size_of(folder)
    while total > max_total_gib * GIB and len(kept) > 1:
        total -= size_of(kept[0])
        shutil.rmtree(kept.pop(0))
    if total > max_total_gib * GIB:
        log.warning(
            "the checkpoints in %s take %.3g GiB, more than checkpoint.max_total_gib = %.3g, although all but the "
            "newest periodic one have been removed",
            folder,
            total / GIB,
            max_total_gib,
        )


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder and its subfolders; links are not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or path.is_file())
