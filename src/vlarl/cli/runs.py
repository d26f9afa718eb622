"""Finds runs by name or folder, and their checkpoints."""

from __future__ import annotations

from pathlib import Path

from vlarl.config.problems import nearest
from vlarl.config.training_data import run_of
from vlarl.errors import UsageError

LISTED = 12


def find_run(run: str, root: str = "runs") -> Path:
    """The folder of a run, given as a path or as a name under the root; an unknown one is an error with a list."""
    for folder in (Path(run), Path(root) / run):
        if (folder / "config.yaml").is_file():
            return folder
    existing = list_runs(Path(root))
    if not existing:
        raise UsageError(f"no run '{run}': {root}/ holds no runs")
    match = nearest(run, existing)
    hint = f"did you mean '{match}'? " if match else ""
    more = f" and {len(existing) - LISTED} more" if len(existing) > LISTED else ""
    raise UsageError(f"no run '{run}'; {hint}Runs in {root}/, newest first: {', '.join(existing[:LISTED])}{more}")


def find_checkpoint(checkpoint: str | Path, root: str = "runs") -> str:
    """The checkpoint that is meant: of a run's name or folder its `checkpoints/final`, any other as it is."""
    text = str(checkpoint)
    for folder in (Path(text).expanduser(), Path(root) / text):
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            final = folder / "checkpoints" / "final"
            if final.is_dir():
                return str(final)
            there = sorted(path.name for path in final.parent.glob("[!.]*") if path.is_dir())
            known = f"its checkpoints are {', '.join(there)}: name one of them" if there else "it has no checkpoint yet"
            raise UsageError(f"the run {folder} has not ended, so there is no checkpoints/final; {known}")
    return text


def run_of_checkpoint(run: str | Path) -> str:
    """The folder of the run that a checkpoint belongs to; a run's name or folder as it is."""
    return str(run_of(str(run)) or run)


def list_runs(root: Path) -> list[str]:
    """Names of the runs under the root, newest first."""
    configs = sorted(root.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent.name for path in configs]
