"""Writes the samples of what vlarl prints into the docs, by running the commands.

    scripts/docs_samples.py            writes them
    scripts/docs_samples.py --check    says which are out of date, and exits with 1

A sample stands between two marks. `| first N` and `| last N` keep some of its lines:

    <!-- sample: vlarl train --dry-run | last 17 -->
    <!-- end of sample -->

Only commands that answer in seconds and print the same on every machine belong here.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from functools import cache
from pathlib import Path

from vlarl.cli import main

ROOT = Path(__file__).resolve().parents[1]
BEGIN = re.compile(r"<!-- sample: vlarl (?P<command>.*?)(?: \| (?P<end>first|last) (?P<count>\d+))? -->\n")
END = "<!-- end of sample -->"
COLUMNS = "110"  # of the terminal that the samples are printed for


def documents() -> list[Path]:
    """The pages that may hold samples."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@cache
def printed(command: str) -> str:
    """What a command prints, called from an empty folder."""
    out, before = io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        os.chdir(folder)
        try:
            main(shlex.split(command))
        except SystemExit:  # argparse ends so, after its message
            pass
        finally:
            os.chdir(before)
    return out.getvalue().rstrip("\n")


def sample(mark: re.Match[str]) -> str:
    """The content of a sample: the command, and what it prints."""
    lines = printed(mark["command"]).splitlines()
    if mark["end"] is not None:
        count = int(mark["count"])
        lines = [*lines[:count], "…"] if mark["end"] == "first" else ["…", *lines[-count:]]
    body = "\n".join(line.rstrip() for line in [f"$ vlarl {mark['command']}", *lines])
    return f"\n```\n{body}\n```\n\n"


def updated(text: str, name: str) -> str:
    """A page with today's samples."""
    parts, place = [], 0
    for mark in BEGIN.finditer(text):
        end = text.find(END, mark.end())
        if end < 0:
            raise SystemExit(f"{name}: the sample of `vlarl {mark['command']}` lacks its end, {END}")
        parts += [text[place : mark.end()], sample(mark)]
        place = end
    return "".join([*parts, text[place:]])


def run(check: bool) -> int:
    """Write all pages, or say which are out of date."""
    os.environ["COLUMNS"] = COLUMNS
    stale = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        new = updated(text, path.name)
        if new == text:
            continue
        stale.append(path.name)
        if not check:
            path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit("usage: scripts/docs_samples.py [--check]")
    sys.exit(run(check="--check" in sys.argv))
