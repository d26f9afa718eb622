"""The list of deliberate breaks fits the source it breaks; scripts/mutation_check.py applies them."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("mutation_check", ROOT / "scripts" / "mutation_check.py")
mutation_check = importlib.util.module_from_spec(_spec)
sys.modules["mutation_check"] = mutation_check  # dataclasses look their module up
_spec.loader.exec_module(mutation_check)

MUTATIONS = mutation_check.read_mutations()


def test_names_are_unique():
    names = [m.name for m in MUTATIONS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_piece_to_break_is_there_once_and_its_tests_exist(mutation):
    broken = mutation_check.mutated_text(mutation)
    compile(broken, mutation.file, "exec")
    for test in mutation.tests:
        path, _, name = test.partition("::")
        name = name.rpartition("::")[2].partition("[")[0]
        assert (ROOT / path).exists()
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
