"""The samples in the docs are what the program prints."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "docs_samples.py"
SPEC = importlib.util.spec_from_file_location("docs_samples", SCRIPT)
docs_samples = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docs_samples)

PAGE = "before\n<!-- sample: vlarl --version -->\nold\n<!-- end of sample -->\nafter\n"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # the script sets its own; this restores the variable afterwards
    docs_samples.printed.cache_clear()


def test_the_samples_are_up_to_date(capsys):
    assert docs_samples.run(check=True) == 0, f"{capsys.readouterr().out}: run .venv/bin/python scripts/docs_samples.py"
    marks = [mark for path in docs_samples.documents() for mark in docs_samples.BEGIN.finditer(path.read_text())]
    assert len(marks) >= 4


def test_a_sample_is_replaced_and_the_rest_stays(tmp_path, monkeypatch, capsys):
    import vlarl

    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(docs_samples, "documents", lambda: [page])
    assert docs_samples.run(check=True) == 1
    assert "out of date: page.md" in capsys.readouterr().out and page.read_text() == PAGE
    assert docs_samples.run(check=False) == 0
    sample = f"```\n$ vlarl --version\nvlarl {vlarl.__version__}\n```"
    begin, end = PAGE.split("old")
    assert page.read_text() == f"{begin}\n{sample}\n\n{end.lstrip()}"
    assert docs_samples.run(check=True) == 0


def test_some_lines_of_a_sample_and_a_refusal():
    text = "<!-- sample: vlarl --help | first 2 -->\n<!-- end of sample -->"
    lines = docs_samples.updated(text, "page").splitlines()
    assert lines[4].startswith("vlarl improves") and lines[6] == "…" and len(lines) == 10
    refused = docs_samples.updated("<!-- sample: vlarl tarin | last 1 -->\n<!-- end of sample -->", "page")
    assert "did you mean 'vlarl train'" in refused


def test_a_sample_without_end_is_named():
    with pytest.raises(SystemExit, match="page: the sample of `vlarl --help` lacks its end"):
        docs_samples.updated("<!-- sample: vlarl --help -->\n", "page")
