"""Attacks vlarl with bad input and faults, and counts tracebacks, hangs and wrong results.

    scripts/reliability.py                                the whole: docs/reliability.md says how long it takes
    scripts/reliability.py --only checkpoints kills       some rows
    scripts/reliability.py --fraction 0.1                 a tenth of every row
    scripts/reliability.py --only checkpoints --case 123  one case again; its folder is kept
    scripts/reliability.py --mutation "weights"           the cases whose mutation has this in its name
    scripts/reliability.py --write                        the table of docs/reliability.md, after the whole

Each defect is printed in full, with the command that runs its case again. The exit code is 1 if there is any.
"""

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from fuzz.harness import ROWS, Outcome, Row, Tally, find_row, run_row  # noqa: E402 - found by the line above

DOC = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table of scripts/reliability.py -->\n", "<!-- end of the table -->"


def metric_sums(row: Row, given: argparse.Namespace) -> list[int]:
    """The cases to run: one, or the first of all up to a fraction, with the mutations that are wanted."""
    if given.case is not None:
        return [given.case]
    first = range(math.ceil(given.fraction * row.cases))
    return [number for number in first if given.mutation in row.mutation(number)]


def table(tallies: Sequence[Tally], seed: int) -> str:
    """The counts in Markdown."""
    lines = [
        "| Attack | Cases | Tracebacks | Hangs | Wrong results | Seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for tally in tallies:
        counts = [len(tally.outcomes), *(tally.count(kind) for kind in ("traceback", "hang", "wrong"))]
        cells = [
            f"**{tally.row.name}**: {tally.row.about}",
            *(f"{count:,}" for count in counts),
            f"{tally.seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Seed {seed}, {date.today().isoformat()}, {os.cpu_count()} cores."])


def with_table(text: str, content: str) -> str:
    """The document with this content between its marks."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOC} lacks its marks: {BEGIN.strip()} and {END}")
    return f"{head}{begin}\n{content}\n\n{end}{tail}"


def show(row: Row, outcome: Outcome, seed: int) -> None:
    """Print the defects of a case, and how to see them again."""
    for defect in outcome.defects:
        print(f"\n{row.name} {outcome.number} ({outcome.mutation}) {defect}")
    print(f"    again: scripts/reliability.py --only {row.name} --seed {seed} --case {outcome.number}", flush=True)


def attack(row: Row, given: argparse.Namespace, folder: Path) -> Tally:
    """Run a row with a line for it, and its defects."""
    numbers = metric_sums(row, given)
    print(f"{row.name}: {len(numbers)} cases", flush=True)

    def note(outcome: Outcome) -> None:
        if outcome.defects:
            show(row, outcome, given.seed)

    if not numbers:
        return Tally(row, given.seed)
    tally = run_row(row, numbers, given.seed, given.jobs, folder, note, keep=given.case is not None)
    answers = ", ".join(f"{count} {answer}" for answer, count in tally.answers().items())
    print(f"{row.name}: {len(tally.defective)} with defects, {answers}; {tally.seconds:.0f} s", flush=True)
    return tally


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--fraction", type=float, default=1.0, metavar="F", help="of the cases of each row")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed is another set of cases")
    parser.add_argument("--mutation", default="", metavar="TEXT", help="only cases whose mutation has this in its name")
    parser.add_argument("--case", type=int, metavar="N", help="this case alone, of the one row of --only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="worker processes")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reliability.md")
    given = parser.parse_args()
    if not 0 < given.fraction <= 1:
        parser.error("--fraction: must be above 0 and at most 1")
    if given.case is not None and len(given.only) != 1:
        parser.error("--case: name its row with --only")
    if given.write and (given.case is not None or given.mutation or given.fraction < 1 or set(given.only) != set(ROWS)):
        parser.error("--write: the table is that of the whole; leave out --only, --mutation, --fraction and --case")
    return given


def main() -> int:
    """Attack, and print the table."""
    given = parse()
    folder = Path(tempfile.mkdtemp(prefix="vlarl-reliability-"))
    try:
        tallies = [attack(find_row(name), given, folder) for name in given.only]
    finally:
        if given.case is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"kept: {folder}")
    content = table(tallies, given.seed)
    print(f"\n{content}")
    if given.write:
        DOC.write_text(with_table(DOC.read_text(encoding="utf-8"), content), encoding="utf-8")
        print(f"written to {DOC.relative_to(ROOT)}")
    return 1 if any(tally.defective for tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
