"""Break the code on purpose and see the tests go red: scripts/mutation_check.py [--only TEXT] [--jobs N] [--list]

Each entry of tests/mutations/*.toml replaces one piece of the source and names the tests that must notice:

    [[mutation]]
    name = "the LoRA output is not scaled"
    file = "src/vlarl/policies/openvla/lora.py"
    find = '''alpha=scale)'''        # occurs exactly once in the file
    replace = '''alpha=1.0)'''
    tests = ["tests/unit/policies/test_adapters.py::test_scale"]

The named tests first run on the code as it is and must pass. Then each mutation is applied to a copy of src/ in a
temporary directory, and its tests must fail there. A mutation that its tests survive is an error, and so is one that
only keeps the tests from being collected: a syntax error proves nothing. Run it with the environment's own Python:
`.venv/bin/python scripts/mutation_check.py`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
TESTS_FAILED = 1  # pytest's exit code; 2 and above: it could not run them
TIMEOUT_S = 900


@dataclass(frozen=True)
class Mutation:
    """One piece of source to replace, and the tests that must fail then."""

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]


def read_mutations(folder: Path = ROOT / "tests" / "mutations") -> list[Mutation]:
    """All mutations of the folder's files, in the order of their names and lines."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutation", []):
            found.append(Mutation(**{**entry, "tests": tuple(entry["tests"])}))
    return found


def mutated_text(mutation: Mutation, root: Path = ROOT) -> str:
    """The file's text with the mutation applied; raises where `find` does not occur exactly once."""
    text = (root / mutation.file).read_text(encoding="utf-8")
    if (count := text.count(mutation.find)) != 1:
        raise ValueError(f"{mutation.name}: {mutation.find!r} occurs {count} times in {mutation.file}, not once")
    return text.replace(mutation.find, mutation.replace)


def run_tests(tests: list[str], source: Path) -> tuple[int, str]:
    """pytest's exit code on these tests with vlarl imported from `source`, and the end of what it printed."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no result within {TIMEOUT_S} s"
    return done.returncode, (done.stdout + done.stderr)[-2000:]


def verdict(mutation: Mutation, copies: SimpleQueue[Path]) -> tuple[str, str]:
    """`red` as it must be, `SURVIVED` or `ERROR`, and what pytest printed."""
    copy = copies.get()
    target = copy / mutation.file
    original = target.read_text(encoding="utf-8")
    try:
        target.write_text(mutated_text(mutation, copy), encoding="utf-8")
        code, output = run_tests(list(mutation.tests), copy / "src")
    finally:
        target.write_text(original, encoding="utf-8")
        copies.put(copy)
    return {TESTS_FAILED: "red", 0: "SURVIVED"}.get(code, f"ERROR (exit code {code})"), output


def check(mutations: list[Mutation], num_jobs: int) -> int:
    """Run everything and print a table; the exit code."""
    for mutation in mutations:
        mutated_text(mutation)  # raises before anything takes time
    tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    print(f"{len(mutations)} mutations; first their {len(tests)} tests on the code as it is …", flush=True)
    code, output = run_tests(tests, ROOT / "src")
    if code != 0:
        print(f"the tests must pass before the code is broken (exit code {code}):\n{output}")
        return 1
    failed = 0
    with tempfile.TemporaryDirectory(prefix="vlarl-mutations-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(num_jobs):
            copy = Path(folder) / str(number)
            shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
            copies.put(copy)
        started = time.monotonic()
        with ThreadPoolExecutor(num_jobs) as threads:
            results = threads.map(lambda mutation: verdict(mutation, copies), mutations)
            for mutation, (result, output) in zip(mutations, results, strict=True):
                print(f"{result:10} {mutation.name}", flush=True)
                if result != "red":
                    failed += 1
                    print(output)
    seconds = time.monotonic() - started
    print(f"{len(mutations) - failed} of {len(mutations)} mutations turned their tests red, in {seconds:.0f} s")
    return 1 if failed else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Break the code on purpose and see the tests go red.")
    parser.add_argument("--only", default="", help="only mutations whose name or file contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="mutations tried at the same time (default 2)")
    parser.add_argument("--list", action="store_true", help="print the mutations and do nothing")
    arguments = parser.parse_args()
    mutations = [m for m in read_mutations() if arguments.only in m.name or arguments.only in m.file]
    if arguments.list:
        for mutation in mutations:
            print(f"{mutation.file}: {mutation.name}")
        return 0
    if not mutations:
        parser.error(f"no mutation's name or file contains {arguments.only!r}")
    return check(mutations, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
