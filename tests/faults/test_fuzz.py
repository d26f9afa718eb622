"""A bounded, seeded part of what scripts/reliability.py runs as a whole: no traceback, no hang, no wrong result."""

import mmap
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fuzz import self_check
from fuzz.harness import MEMORY_BYTES, Outcome, Row, find_row, run_case, run_row

SEED = 0
FIRST = {"configurations": 208, "datasets": 80, "checkpoints": 28}
"""Of these rows the first cases are run, so that every mutation is."""

NAMED = {
    "rewards": (
        *(
            "service: answers",
            "service: closes at once",
            "service: drips its body",
            "service: sends a body without end",
        ),
        *("service: sends NaN", "service: sends lists", "service: redirects to itself", "function: of_numpy"),
        "function: not_a_number",
        "module: is no Python",
    ),
    "resumed": ("nothing damaged", "trainer truncated", "partial checkpoints"),
    "kills": ("while a checkpoint is written",),
    "environments": ("once: is killed", "always: reset raises", "always: raises"),
}
"""Of these rows, whose cases take seconds, some."""


@pytest.fixture(autouse=True)
def same_folder() -> Iterator[None]:
    """Cases change the working folder."""
    before = Path.cwd()
    yield
    os.chdir(before)


def shown(row: Row, outcomes: Sequence[Outcome]) -> str:
    """The defects of some cases, and how to see them again."""
    return "\n\n".join(
        f"scripts/reliability.py --only {row.name} --seed {SEED} --case {outcome.number} ({outcome.mutation})\n"
        + "\n".join(map(str, outcome.defects))
        for outcome in outcomes
        if outcome.defects
    )


@pytest.mark.parametrize("name", [*FIRST, *NAMED])
def test_an_attack_is_answered(name, tmp_path):
    row = find_row(name)
    chosen = range(FIRST[name]) if name in FIRST else [row.mutations.index(mutation) for mutation in NAMED[name]]
    shared = tmp_path / "shared"
    shared.mkdir()
    row.prepare(shared)
    outcomes = [run_case(row, number, SEED, shared, tmp_path / str(number)) for number in chosen]
    assert outcomes
    assert not shown(row, outcomes), shown(row, outcomes)


def test_the_harness_finds_every_kind_of_defect(tmp_path):
    """In a worker process, as scripts/reliability.py does; one that hangs or dies is replaced."""
    row = self_check.ROW
    tally = run_row(row, range(row.cases), SEED, 1, tmp_path)
    found = {outcome.mutation: tuple(defect.kind for defect in outcome.defects) for outcome in tally.outcomes}
    assert found == self_check.EXPECTED
    assert [tally.count(kind) for kind in ("traceback", "hang", "wrong")] == [3, 1, 4]
    assert "time.sleep(600)" in shown(row, tally.defective) or "self_check.py" in shown(row, tally.defective)


def test_a_case_is_the_same_whenever_it_is_run(tmp_path):
    """Its mutant follows from row, seed and number alone."""
    row = find_row("configurations")
    files = []
    for folder in ("one", "two"):
        run_case(row, 0, SEED, tmp_path, tmp_path / folder)
        files.append((tmp_path / folder / "mine.yaml").read_bytes())
    run_case(row, 0, SEED + 1, tmp_path, tmp_path / "another")
    assert files[0] == files[1] != (tmp_path / "another" / "mine.yaml").read_bytes()


def test_a_case_has_its_memory_whatever_this_process_has_already(tmp_path):
    """Address space alone: as libraries for GPUs take it."""
    sizes = (64 << 20, MEMORY_BYTES + (1 << 30))
    row = Row("memory", "", ("little", "much"), 2, 60.0, lambda case: (str(len(bytes(sizes[case.number]))), ()))
    before = resource.getrlimit(resource.RLIMIT_AS)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 2 * MEMORY_BYTES, flags=flags, prot=mmap.PROT_READ):  # takes no memory: it can't be written
        little, much = (run_case(row, number, SEED, tmp_path, tmp_path / str(number)) for number in range(2))
    assert (little.answer, little.defects) == (str(sizes[0]), ())
    assert [defect.kind for defect in much.defects] == ["traceback"] and "MemoryError" in much.defects[0].detail
    assert resource.getrlimit(resource.RLIMIT_AS) == before
