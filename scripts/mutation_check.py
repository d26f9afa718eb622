"""Break the code on purpose and see the tests go red: scripts/mutation_check.py [--only TEXT] [--jobs N] [--list]

Each entry of tests/mutations/*.toml replaces one piece of the source and names the tests that must notice:

    [[mutation]]
    name = "the LoRA output is not scaled"
    file = "src/vlarl/policies/lora.py"
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
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS_FAILED, CANNOT_RUN = 1, 3  # pytest's exit codes; 2 and above: it could not run the tests
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


def mutated_text(mutation: Mutation) -> str:
    """The file's text with the mutation applied; raises where `find` does not occur exactly once."""
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    if (count := text.count(mutation.find)) != 1:
        raise ValueError(f"{mutation.name}: {mutation.find!r} occurs {count} times in {mutation.file}, not once")
    return text.replace(mutation.find, mutation.replace)


def start_tests(tests: Sequence[str], source: Path, output: Path) -> int:
    """Run pytest on these tests in a fork of this process, with vlarl imported from `source`; the fork's process id.

    A fork has torch and the other libraries loaded already, which takes longer than most tests.
    """
    if pid := os.fork():
        return pid
    code = CANNOT_RUN
    try:
        os.setsid()  # so that whatever the tests start can be ended with them
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = str(source)
        sys.path.insert(0, str(source))
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def preload() -> None:
    """Import what the tests will need, but nothing of vlarl: that is what changes."""
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    assert "vlarl" not in sys.modules


class Runner:
    """Runs up to `num_jobs` mutations at a time, each on a copy of the source of its own."""

    def __init__(self, folder: Path, num_jobs: int) -> None:
        self.copies = [folder / str(number) for number in range(num_jobs)]
        for copy in self.copies:
            shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        self.running: dict[int, tuple[Mutation, Path, float]] = {}

    def start(self, mutation: Mutation) -> None:
        """Break a free copy and start the tests that must notice."""
        copy = self.copies.pop()
        (copy / mutation.file).write_text(mutated_text(mutation), encoding="utf-8")
        pid = start_tests(mutation.tests, copy / "src", copy / "output")
        self.running[pid] = mutation, copy, time.monotonic() + TIMEOUT_S

    def wait(self) -> tuple[Mutation, int, str]:
        """The next mutation whose tests have ended, pytest's exit code, and the end of what it printed."""
        while True:
            for pid, (mutation, copy, deadline) in self.running.items():
                done, status = os.waitpid(pid, os.WNOHANG)
                if not done and time.monotonic() > deadline:
                    os.killpg(pid, signal.SIGKILL)
                    done, status = os.waitpid(pid, 0)
                if done:
                    del self.running[pid]
                    shutil.copyfile(ROOT / mutation.file, copy / mutation.file)
                    self.copies.append(copy)
                    printed = (copy / "output").read_text(encoding="utf-8", errors="replace")
                    return mutation, os.waitstatus_to_exitcode(status), printed[-2000:]
            time.sleep(0.05)


def check(mutations: list[Mutation], num_jobs: int) -> int:
    """Run everything and print a table; the exit code."""
    for mutation in mutations:
        mutated_text(mutation)  # raises before anything takes time
    preload()
    tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    print(f"{len(mutations)} mutations; first their {len(tests)} tests on the code as it is …", flush=True)
    started, survivors = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="vlarl-mutations-") as folder:
        output = Path(folder) / "output"
        _, status = os.waitpid(start_tests(tests, ROOT / "src", output), 0)
        if code := os.waitstatus_to_exitcode(status):
            print(f"the tests must pass before the code is broken (exit code {code}):\n{output.read_text()[-4000:]}")
            return 1
        runner, left = Runner(Path(folder), num_jobs), list(reversed(mutations))
        while left or runner.running:
            while left and runner.copies:
                runner.start(left.pop())
            mutation, code, printed = runner.wait()
            result = {TESTS_FAILED: "red", 0: "SURVIVED"}.get(code, f"ERROR (exit code {code})")
            print(f"{result:10} {mutation.name}", flush=True)
            if result != "red":
                survivors.append(mutation.name)
                print(printed, flush=True)
    num_red, seconds = len(mutations) - len(survivors), time.monotonic() - started
    print(f"{num_red} of {len(mutations)} mutations turned their tests red, in {seconds:.0f} s")
    return 1 if survivors else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Break the code on purpose and see the tests go red.")
    parser.add_argument("--only", default="", help="only mutations whose name or file contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="mutations tried at the same time (default 2)")
    parser.add_argument("--list", action="store_true", help="print the mutations and do nothing")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
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
