"""Text of files and instructions reaches the terminal and the log without what would steer a terminal."""

import io
import json
import logging
from dataclasses import replace

import pytest
from fakes.eval_records import record
from rich.console import Console

from vlarl.cli import evaluate, main
from vlarl.errors import UsageError
from vlarl.evaluation.record import EvalDirectory
from vlarl.observability.log_file import log_to_file
from vlarl.observability.progress import Progress
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.terminal import printable

CLEAR, TITLE = "\x1b[2J\x1b[31m", "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("open the drawer", "open the drawer"),
        ("größer → 3\tx\ny", "größer → 3\tx\ny"),
        (f"{CLEAR}red\x1b[0m", "red"),
        (f"a{TITLE}b", "ab"),
        ("a\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\b", "alinkb"),
        ("\x9b2Ja\x9d0;t\x9cb\x90q\x9cc", "abc"),
        ("50%\r100%\x08\x07\x7f", "50%100%"),
        ("a\u202eb\u2066c", "abc"),
        ("\x1b", ""),
        ("a\x1b(Bb", "ab"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown


def test_status_strips_what_files_say(tmp_path, capsys):
    run = RunDirectory.create(tmp_path, "first")
    run.write_config("run: {}\n")
    run.write_status("failed", 1, 2, f"{CLEAR}bad{TITLE}")
    run.log_file.write_text(f"{TITLE}last line\x9b2J\n")
    for arguments in (["first"], ["first", "--json"], [], ["--json"]):
        assert main(["status", *arguments, "--run.root", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert not set(out) & set("\x1b\x07\x9b"), arguments
    assert json.loads(out)[0]["message"].endswith("owned\x07"), "JSON escapes it"


def test_eval_and_compare_strip_instructions_and_names(tmp_path, capsys):
    hostile = record({(0, 0): True, (0, 1): False}, checkpoint=f"{TITLE}A")
    episodes = tuple(replace(e, instruction=f"{CLEAR}go") for e in hostile.result.episodes)
    hostile = replace(hostile, result=replace(hostile.result, episodes=episodes))
    evaluate._print_result(hostile)
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.splitlines()[1].endswith("  go")
    for name in "ab":
        EvalDirectory.create(tmp_path / name).write(hostile)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "A: A\n" in out


def test_notes_of_a_run_are_clean():
    console = Console(file=io.StringIO())
    with Progress(1, console) as progress:
        progress.note(f"{CLEAR}the reward at http://h/?t=hidden failed{TITLE}")
    assert console.file.getvalue().splitlines()[0] == "the reward at http://h/?t=*** failed"


def test_the_log_and_errors_are_clean(tmp_path, capsys, monkeypatch):
    with log_to_file(tmp_path / "x.log"):
        logging.getLogger("vlarl.test").error("%sbad http://h/?t=hidden", CLEAR, exc_info=ValueError(TITLE + "why"))
    text = (tmp_path / "x.log").read_text()
    assert "\x1b" not in text and "\x07" not in text and "hidden" not in text
    assert "bad http://h/?t=***" in text and "ValueError: why" in text

    def fail(_):
        raise UsageError(f"{CLEAR}no {TITLE}http://u:word@h/x")

    monkeypatch.setattr("vlarl.cli._dispatch", fail)
    assert main([]) == 2
    assert capsys.readouterr().err == "error: no http://***@h/x\n"
