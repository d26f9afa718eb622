"""`vlarl compare`: two finished evaluations side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from vlarl.cli import arguments as args


def compare(arguments: Sequence[str]) -> int:
    """Compare two evaluations episode by episode and print which is better, and how sure that is."""
    about = (
        "Compare two evaluations, paired by task, initial state and seed, by McNemar's exact test. "
        "`vlarl eval A --against B` evaluates and compares."
    )
    parser = args.Parser("compare", about)
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=f"FOLDER_{name.upper()}", help="folder with results.json")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)

    from vlarl.cli.eval_display import comparison_lines, comparison_table
    from vlarl.observability.comparison import compare as compare_records
    from vlarl.observability.eval_dir import read_record
    from vlarl.observability.terminal import printable

    a, b = read_record(given.a), read_record(given.b)
    comparison = compare_records(a, b)
    if given.json:
        checkpoints = {"checkpoint_a": a.settings.checkpoint, "checkpoint_b": b.settings.checkpoint}
        warnings = {"warnings_a": list(a.settings.warnings), "warnings_b": list(b.settings.warnings)}
        print(json.dumps(checkpoints | comparison.to_json() | warnings, indent=2))
    else:
        print(printable("\n".join([comparison_table(comparison), *comparison_lines(comparison, a, b)])))
    return 0
