"""Resuming from an earlier checkpoint of a run: the later ones are moved to a folder of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlarl.json_files import read_object
from vlarl.training.checkpoint import COUNTERS
from vlarl.training.state import TrainerState

SET_ASIDE = "set_aside"  # folder in `checkpoints`
NOTE = "metadata.json"


def set_later_aside(folder: Path, chosen: Path, state: TrainerState) -> list[str]:
    """Move the checkpoints saved after the chosen one into `set_aside`, so that the next resume finds the chosen one.

    Returns their names. A checkpoint that can't be read counts as later.
    """
    later = [path for path in sorted(folder.glob("[!.]*")) if path.name != SET_ASIDE and _is_later(path, chosen, state)]
    for path in later:
        target = folder / SET_ASIDE / path.name
        copy = 1
        while target.exists():
            copy += 1
            target = folder / SET_ASIDE / f"{path.name}-{copy}"
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    return [path.name for path in later]


def resume_lines(checkpoint: Path | None, done: int, later: Sequence[str], unit: str = "iteration") -> list[str]:
    """What a resumed run says first: where it resumes, in the units that it counts, and what was set aside for that."""
    if checkpoint is None:
        return [f"resuming without a checkpoint, as none was saved yet: it starts again at {unit} 1"]
    lines = [f"resuming from checkpoint {checkpoint.name}, after {unit} {done}"]
    if later:
        lines.append(f"set aside, in {checkpoint.parent / SET_ASIDE}: {', '.join(later)}")
    return lines


def _is_later(path: Path, chosen: Path, state: TrainerState) -> bool:
    if not path.is_dir() or path.name == chosen.name:
        return False
    if (path / COUNTERS).is_file():
        return _exceeds(read_object(path / COUNTERS), "iteration", state.iteration)
    if not (path / NOTE).is_file():
        return False
    noted = read_object(path / NOTE)  # of a checkpoint with only a policy: the averages, or the best so far
    if "global_step" in noted:
        return _exceeds(noted, "global_step", state.env_steps)
    return _exceeds(noted, "training_step", state.iteration)


def _exceeds(counters: dict[str, Any], name: str, limit: int) -> bool:
    """Whether a counter exceeds the limit; one that is missing or not numeric counts as exceeding it."""
    value = counters.get(name)
    return not (isinstance(value, int | float) and value <= limit)
