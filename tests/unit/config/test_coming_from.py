"""docs/coming-from.md has a row for every option that the seeds name, and names no option that doesn't exist."""

import re
from pathlib import Path

from vlarl.config import Config, FinetuneConfig
from vlarl.config.derive import Derived, derive
from vlarl.config.describe import options
from vlarl.config.source.aliases import ALIASES, ELSEWHERE, NEEDLESS, TRANSLATED, alias_of, translation_of

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text(encoding="utf-8")
NAMED = (Path(__file__).parent / "seed_options.txt").read_text(encoding="utf-8").splitlines()
FILES = ("json", "jsonl", "md", "py", "yaml")

ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line[:3] == "| 0"]
SYSTEMS = PAGE[: PAGE.index("## The options of VLA-RL")]
PAIRS = [line.strip("| ").split(" | ") for line in SYSTEMS.splitlines() if line.startswith("| `")]
KNOWN = options(Config) | options(FinetuneConfig)


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


def dotted(text):
    return [name for name in quoted(text) if re.fullmatch(r"\w+\.\w+", name) and not name.endswith(FILES)]


def test_every_named_option_has_one_row_in_its_order():
    assert [f"{seed} {option}" for seed, option, _ in ROWS] == [line for line in NAMED if not line.startswith("#")]
    assert len(ROWS) == 158


def test_every_dotted_name_is_an_option():
    assert [name for _, _, advice in ROWS for name in dotted(advice) if name not in KNOWN] == []
    assert [name for _, ours in PAIRS for name in dotted(ours) if name not in KNOWN] == []
    assert sum(bool(dotted(advice)) for _, _, advice in ROWS) > 120


def test_every_row_says_where_or_why():
    reasons = ("derived", "not needed: ", "not an option of training: ")
    for _, option, advice in ROWS:
        assert "not yet" not in advice, option
        assert dotted(advice) or advice.startswith((*reasons, "`vlarl ")), f"{option}: {advice}"


def test_derived_values_are_derived():
    for _, option, advice in ROWS:
        if "derived: `" in advice:
            named = [name for name in quoted(advice.partition("derived: ")[2]) if "." not in name]
            assert named and all(hasattr(derive(Config()), name) for name in named), option
    assert {"total_episodes", "world_size"} <= set(Derived.__dataclass_fields__)


def test_an_option_whose_old_name_is_a_flag_is_where_the_flag_sets_it():
    known = frozenset(KNOWN)
    aliased = {option: path for _, option, _ in ROWS if (path := alias_of(option, frozenset(options(Config))))}
    assert len(aliased) > 70
    assert [option for _, option, advice in ROWS if option in aliased and aliased[option] not in dotted(advice)] == []
    translated = {option: found.options for _, option, _ in ROWS if (found := translation_of(option, known))}
    assert len(translated) > 12
    for _, option, advice in ROWS:
        assert set(translated.get(option, ())) <= set(dotted(advice)), option


def test_every_name_of_the_tables_by_system_means_what_the_table_says():
    known = frozenset(options(Config))
    assert len(PAIRS) > 50
    for theirs, ours in PAIRS:
        for name in quoted(theirs):
            path, translation = alias_of(name, known), translation_of(name, known)
            if path is not None:
                assert path in dotted(ours), name
            elif translation is not None and translation.options:
                assert set(translation.options) & set(dotted(ours)), name
            elif name in NEEDLESS:
                assert "with a note" in ours, name
            else:
                assert (name in ELSEWHERE or name in TRANSLATED) and "refused" in ours, name
    named = {name for theirs, _ in PAIRS for name in quoted(theirs)}
    assert named <= {*ALIASES, *TRANSLATED, *NEEDLESS, *ELSEWHERE}
