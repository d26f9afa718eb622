"""Every option is described, and docs/configuration.md says what the schema says."""

from pathlib import Path

import pytest

from vlarl.config import Config, FinetuneConfig
from vlarl.config.describe import help_text, markdown_table, options

DOC = Path(__file__).parents[3] / "docs" / "configuration.md"


@pytest.mark.parametrize("schema", [Config, FinetuneConfig])
def test_every_option_has_a_meaning(schema):
    assert [option.path for option in options(schema).values() if not option.doc.endswith((".", "…"))] == []


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("run.seed", "an integer >= 0"),
        ("run.num_threads", "an integer > 0 and <= 1024 or null"),
        ("run.name", "text or null"),
        ("env.task_ids", "a list of integers >= 0, or null"),
        ("env.cameras", "a list of agent or wrist, or null"),
        ("algorithm.gamma", "a number >= 0 and <= 1"),
        ("algorithm.name", "one of grpo, rloo, group_norm, cpgd, reinforce, reinforce_baseline, reinforce_pp, ppo"),
        ("optim.betas", "a list of 2, each a number >= 0 and < 1"),
        ("logging.wandb", "true or false"),
    ],
)
def test_what_is_allowed_in_words(path, allowed):
    assert options(Config)[path].allowed == allowed


def test_help_has_a_line_for_every_option():
    lines = help_text(Config, 100).splitlines()
    for option in options(Config).values():
        assert any(line.startswith(f"  --{option.path} ") for line in lines), option.path
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(("command", "schema"), [("train", Config), ("finetune", FinetuneConfig)])
def test_the_tables_in_the_documentation_are_up_to_date(command, schema):
    text = DOC.read_text(encoding="utf-8")
    begin, end = f"<!-- options of {command} -->\n", f"<!-- end of {command} -->"
    written = text[text.index(begin) + len(begin) : text.index(end)]
    assert written.strip() == markdown_table(schema).strip(), "run .venv/bin/python scripts/option_tables.py"
