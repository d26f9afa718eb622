"""`vlarl report`: the report of a run, written again."""

from __future__ import annotations

from collections.abc import Sequence

from vlarl.cli import arguments as args
from vlarl.cli.runs import LISTED, find_run
from vlarl.config.paths import brief
from vlarl.config.run_checkpoints import list_runs
from vlarl.errors import UsageError


def report(arguments: Sequence[str]) -> int:
    """Write a run's report.html again and print where it is."""
    parser = args.Parser("report", "Write the report of a run again, from the files in its folder.")
    parser.add_argument("run", nargs="?", metavar="RUN", help="name or folder of a run")
    args.add_root(parser)
    given = parser.parse_args(arguments)
    if given.run is None:
        runs = list_runs(given.root)
        known = f"Newest first: {', '.join(runs[:LISTED])}" if runs else f"{given.root}/ holds none"
        raise UsageError(f"name a run: `vlarl report RUN` takes the name or the folder of a run. {known}")
    folder = find_run(given.run, given.root)

    from vlarl.observability.report import write_report

    print(f"report: {brief(write_report(folder))}")
    return 0
