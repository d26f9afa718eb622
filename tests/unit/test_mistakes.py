"""Messages for the mistakes of tests/mistakes/*.toml: the exit code, and the words that help."""

import shlex
import tomllib
from pathlib import Path

import pytest

from vlarl.cli import main

FOLDER = Path(__file__).resolve().parents[1] / "mistakes"
KEYS = {"name", "command", "exit", "says", "never", "files"}


def read_mistakes() -> list[dict]:
    """All entries, in the order of the files' names."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        found += tomllib.loads(path.read_text(encoding="utf-8"))["mistake"]
    return found


MISTAKES = read_mistakes()


@pytest.mark.parametrize("mistake", [pytest.param(m, id=m["name"]) for m in MISTAKES])
def test_the_message_helps(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in mistake.get("files", {}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    command = [part.replace("{folder}", str(tmp_path)) for part in shlex.split(mistake["command"])]
    try:
        code = main(command)
    except SystemExit as stop:  # argparse's way to refuse
        code = stop.code
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert code == mistake["exit"], printed
    for words in mistake["says"]:
        assert words.replace("{folder}", str(tmp_path)) in printed, printed
    for words in ["Traceback", *mistake.get("never", [])]:
        assert words not in printed, printed


def test_each_entry_can_fail():
    assert len({mistake["name"] for mistake in MISTAKES}) == len(MISTAKES), "two entries of one name"
    for mistake in MISTAKES:
        assert set(mistake) <= KEYS, mistake["name"]
        assert mistake["says"], mistake["name"]
