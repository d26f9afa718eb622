"""`vlarl compare`: compare two finished evaluations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from vlarl.cli import arguments as args
from vlarl.config.paths import brief
from vlarl.config.run_checkpoints import find_run_folder
from vlarl.errors import UsageError


def compare(arguments: Sequence[str]) -> int:
    """Compare two evaluations episode by episode and print which is better, with the p-value."""
    about = (
        "Compare two evaluations, paired by task, initial state and seed, by McNemar's exact test. "
        "A run with one evaluation may be named itself. `vlarl eval A --against B` evaluates and compares."
    )
    parser = args.Parser("compare", about)
    for name in ("a", "b"):
        known = "folder with results.json, or the name or folder of a run that has one evaluation"
        parser.add_argument(name, metavar=f"RESULTS_{name.upper()}", help=known)
    args.add_root(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)

    from vlarl.cli.eval_display import comparison_lines, comparison_table
    from vlarl.evaluation.compare import compare as compare_records
    from vlarl.evaluation.record import read_record
    from vlarl.observability.terminal import printable

    folders = [_results(name, given.root, other) for name, other in ((given.a, given.b), (given.b, given.a))]
    a, b = (read_record(folder) for folder in folders)
    comparison = compare_records(a, b)
    if given.json:
        checkpoints = {"checkpoint_a": a.settings.checkpoint, "checkpoint_b": b.settings.checkpoint}
        warnings = {"warnings_a": list(a.settings.warnings), "warnings_b": list(b.settings.warnings)}
        print(json.dumps(checkpoints | comparison.to_json() | warnings, indent=2))
    else:
        print(printable("\n".join([comparison_table(comparison), *comparison_lines(comparison, a, b)])))
    return 0


def _results(name: str, root: str, other: str) -> Path:
    """The folder of an evaluation: as named, or the only complete one of the named run."""
    run = find_run_folder(name, root)
    if run is None or (Path(name) / "results.json").is_file():
        return Path(name).expanduser()
    from vlarl.evaluation.record import find_records

    complete = [r.folder for r in find_records(run / "eval") if r.result.complete and r.settings.replay_of is None]
    folders = [folder for folder in complete if folder is not None]
    if len(folders) == 1:
        return folders[0]
    both = f"`vlarl eval {name} --against {other}` evaluates both on the same episodes and compares them"
    if not folders:
        raise UsageError(f"the run {brief(run)} has no complete evaluation to compare: {both}.")
    listed = ", ".join(brief(folder) for folder in folders)
    many = f"the run {brief(run)} has {len(folders)} evaluations, newest first: {listed}"
    raise UsageError(f"{many}. Name one of them; or {both}.")
