"""Finds runs by name or folder."""

from __future__ import annotations

from pathlib import Path

from vlarl.config.paths import expanded
from vlarl.config.problems import nearest
from vlarl.config.run_checkpoints import list_runs
from vlarl.errors import UsageError

LISTED = 12


def find_run(run: str, root: str = "runs") -> Path:
    """The folder of a run, given as a path or as a name under the root; UsageError lists the runs if it is unknown."""
    for folder in (expanded(run), expanded(root) / run):
        if (folder / "config.yaml").is_file():
            return folder
    existing = list_runs(expanded(root))
    if not existing:
        raise UsageError(
            f"no run '{run}': {root}/ holds no runs. `vlarl train` makes one; --root DIR names the folder of other runs"
        )
    match = nearest(run, existing)
    hint = f"did you mean '{match}'? Runs" if match else "runs"
    more = f" and {len(existing) - LISTED} more" if len(existing) > LISTED else ""
    raise UsageError(f"no run '{run}'; {hint} in {root}/, newest first: {', '.join(existing[:LISTED])}{more}")
