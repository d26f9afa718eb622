"""docs/seed-options.md answers for every option that the seeds name, and names no option that isn't there."""

import re
from pathlib import Path

from vlarl.config import Config, FinetuneConfig
from vlarl.config.derive import Derived, derive
from vlarl.config.describe import options
from vlarl.config.flags import ALIASES

PAGE = (Path(__file__).parents[3] / "docs" / "seed-options.md").read_text(encoding="utf-8")
NAMED = (Path(__file__).parent / "seed_options.txt").read_text(encoding="utf-8").splitlines()
FILES = ("json", "jsonl", "md", "py", "yaml")

ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line[:3] == "| 0"]
KNOWN = options(Config) | options(FinetuneConfig)


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


def dotted(text):
    return [name for name in quoted(text) if re.fullmatch(r"\w+\.\w+", name) and not name.endswith(FILES)]


def test_every_named_option_has_one_row_in_its_order():
    assert [f"{seed} {option}" for seed, option, _ in ROWS] == [line for line in NAMED if not line.startswith("#")]
    assert len(ROWS) == 158


def test_every_dotted_name_is_an_option():
    assert [name for name in dotted(PAGE) if name not in KNOWN] == []
    assert sum(bool(dotted(answer)) for _, _, answer in ROWS) > 120


def test_every_row_says_where_or_why():
    reasons = ("derived", "not needed: ")
    for _, option, answer in ROWS:
        assert "not yet" not in answer, option
        assert dotted(answer) or answer.startswith((*reasons, "`vlarl ")), f"{option}: {answer}"


def test_derived_numbers_are_derived():
    for _, option, answer in ROWS:
        if "derived: `" in answer:
            named = [name for name in quoted(answer.partition("derived: ")[2]) if "." not in name]
            assert named and all(hasattr(derive(Config()), name) for name in named), option
    assert {"total_episodes", "world_size"} <= set(Derived.__dataclass_fields__)


def test_an_option_whose_old_name_is_a_flag_is_where_the_flag_sets_it():
    aliased = {option: ALIASES[flag] for _, option, _ in ROWS if (flag := option.replace("_", "-")) in ALIASES}
    assert len(aliased) > 40
    assert [option for _, option, answer in ROWS if option in aliased and aliased[option] not in dotted(answer)] == []
