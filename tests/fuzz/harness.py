"""Runs many cases of one kind of attack, each with a deadline, and counts tracebacks, hangs and wrong results.

    scripts/reliability.py, tests/faults/test_fuzz.py
        │  Row: what is attacked, by which mutations, how often
        ▼
    run_row ──► worker process 0, 1 …   each runs one case at a time and returns its Outcome
        │         a worker that misses the deadline of a case is killed with all its children: the case is a hang
        ▼         a worker that dies is replaced: the case is a traceback
    Tally

A case is told by its row, the seed and its number. The number chooses the mutation in turn, and everything random about
the case follows from the three, so that any case can be run again alone.
"""

import faulthandler
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Literal

DefectKind = Literal["traceback", "hang", "wrong"]
MEMORY_BYTES = 6 << 30  # that a case may add to the address space: a mutant that asks for more gets none
MARKER = "VLARL_FUZZ_CASE"  # environment variable that all processes of a case inherit
DETAIL_CHARACTERS = 4_000


@dataclass(frozen=True)
class Defect:
    """One thing that went wrong in a case."""

    kind: DefectKind
    detail: str

    def __str__(self) -> str:
        text = self.detail.strip()
        begin, end = DETAIL_CHARACTERS // 4, 3 * DETAIL_CHARACTERS // 4
        short = text if len(text) <= DETAIL_CHARACTERS else f"{text[:begin]}\n[…]\n{text[-end:]}"
        return f"{self.kind}: {short}"


@dataclass(frozen=True)
class Case:
    """One attack."""

    row: str
    number: int
    seed: int
    mutation: str
    folder: Path  # empty, this case's own
    shared: Path  # what the row has prepared, for reading only

    def rng(self) -> random.Random:
        """Everything random about the case."""
        return random.Random(f"{self.row}/{self.seed}/{self.number}")

    @property
    def marker(self) -> str:
        """Which case a process belongs to."""
        return f"{self.row}/{self.seed}/{self.number}/{self.folder}"


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    number: int
    mutation: str
    answer: str  # worked, refused: which of them happened how often is a check that the attack is one
    defects: tuple[Defect, ...] = ()


@dataclass(frozen=True)
class Row:
    """One kind of attack: `run` is called for each case, in a process that `prepare` need not have run in."""

    name: str
    about: str  # for the table in docs/reliability.md
    mutations: tuple[str, ...]
    cases: int  # of the whole
    deadline_s: float  # of one case, on a machine with work of its own
    run: Callable[[Case], tuple[str, Sequence[Defect]]]
    prepare: Callable[[Path], None] = field(default=lambda folder: None)
    deadlines: Mapping[str, float] = field(default_factory=dict)  # of mutations whose name begins so, before a colon

    def deadline(self, number: int) -> float:
        """Seconds that a case may take."""
        return self.deadlines.get(self.mutation(number).partition(":")[0], self.deadline_s)

    def mutation(self, number: int) -> str:
        """The mutation of a case."""
        return self.mutations[number % len(self.mutations)]


ROWS = ("configurations", "checkpoints", "datasets", "resumed", "kills", "rewards", "environments")
"""The modules of this folder that hold a ROW."""


def find_row(name: str) -> Row:
    """The row of a module of this folder."""
    row: Row = import_module(f"fuzz.{name}").ROW
    return row


@dataclass
class Tally:
    """What became of the cases of a row."""

    row: Row
    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, kind: DefectKind) -> int:
        """Cases with a defect of this kind."""
        return sum(any(defect.kind == kind for defect in outcome.defects) for outcome in self.outcomes)

    @property
    def defective(self) -> list[Outcome]:
        """The cases with a defect, in their order."""
        return sorted((outcome for outcome in self.outcomes if outcome.defects), key=lambda outcome: outcome.number)

    def answers(self) -> dict[str, int]:
        """How often each answer was given."""
        return dict(Counter(outcome.answer for outcome in self.outcomes).most_common())


def run_case(row: Row, number: int, seed: int, shared: Path, folder: Path) -> Outcome:
    """Run one case here and now; whatever it raises is a defect."""
    case = Case(row.name, number, seed, row.mutation(number), folder, shared)
    folder.mkdir(parents=True)
    os.environ[MARKER] = case.marker
    before = resource.getrlimit(resource.RLIMIT_AS)
    import_module("torch")  # whose libraries for a GPU alone may take more than a case
    allowed = [limit for limit in (_address_space() + MEMORY_BYTES, *before) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(allowed), before[1]))
    try:
        answer, defects = row.run(case)
    except Exception:  # noqa: BLE001 - the program under attack is called here
        answer, defects = "failed", [Defect("traceback", traceback.format_exc())]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        os.environ.pop(MARKER, None)
        os.chdir("/")
    return Outcome(number, case.mutation, answer, tuple(defects))


def _address_space() -> int:
    """Bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def run_row(
    row: Row,
    numbers: Sequence[int],
    seed: int,
    jobs: int,
    folder: Path,
    note: Callable[[Outcome], None] = lambda outcome: None,
    keep: bool = False,
) -> Tally:
    """Run these cases of a row in `jobs` worker processes; `keep` leaves their folders."""
    began = time.monotonic()
    shared = folder / row.name / "shared"
    shared.mkdir(parents=True)
    tally = Tally(row, seed)
    with _Pool(row, seed, shared, jobs, folder / row.name, keep) as pool:
        for outcome in pool.outcomes(numbers):
            tally.outcomes.append(outcome)
            note(outcome)
    tally.seconds = time.monotonic() - began
    return tally


class _Worker:
    """A process that runs cases, one at a time."""

    def __init__(self, row: Row, seed: int, shared: Path) -> None:
        self.row, self.seed, self.shared = row, seed, shared
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (row.name, seed, str(shared), theirs)
        self.process = context.Process(target=_work, args=arguments)
        self.process.start()
        theirs.close()
        self.number: int | None = None
        self.folder = Path()
        self.deadline = 0.0

    def give(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.deadline = time.monotonic() + self.row.deadline(number)
        self.connection.send((number, str(folder)))

    def kill(self) -> None:
        """End it and all that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


class _Pool:
    """Workers, and what each of them is at."""

    def __init__(self, row: Row, seed: int, shared: Path, jobs: int, folder: Path, keep: bool) -> None:
        self.row, self.seed, self.shared, self.folder, self.keep = row, seed, shared, folder, keep
        self.workers = [_Worker(row, seed, shared)]
        self.jobs = jobs

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()

    def outcomes(self, numbers: Sequence[int]) -> Iterator[Outcome]:
        """The outcomes of the cases, as they end."""
        self._prepare()
        self.workers += [_Worker(self.row, self.seed, self.shared) for _ in range(min(self.jobs, len(numbers)) - 1)]
        waiting = list(reversed(numbers))
        while waiting or any(worker.number is not None for worker in self.workers):
            for worker in self.workers:
                if worker.number is None and waiting:
                    number = waiting.pop()
                    worker.give(number, self.folder / str(number))
            yield from self._ended()

    def _prepare(self) -> None:
        """The first worker prepares the row, so that this process needs nothing of the program."""
        first = self.workers[0]
        first.connection.send(None)
        problem = first.connection.recv()
        if problem:
            raise RuntimeError(f"{self.row.name} can't be prepared:\n{problem}")

    def _ended(self) -> Iterator[Outcome]:
        busy = {worker.connection: worker for worker in self.workers if worker.number is not None}
        wait(list(busy), max(0.0, min(worker.deadline for worker in busy.values()) - time.monotonic()))
        for connection, worker in busy.items():
            outcome = self._outcome(worker) if connection.poll() or time.monotonic() >= worker.deadline else None
            if outcome is None:
                continue
            if not self.keep:
                shutil.rmtree(worker.folder, ignore_errors=True)
            worker.number = None
            yield outcome

    def _outcome(self, worker: _Worker) -> Outcome:
        """What a worker answered; one that died or hangs is replaced."""
        assert worker.number is not None
        number, mutation = worker.number, self.row.mutation(worker.number)
        try:
            if worker.connection.poll():
                outcome: Outcome = worker.connection.recv()
                return outcome
            stacks = (worker.folder.parent / f"stacks-{worker.process.pid}").read_text()
            late = f"no answer within {self.row.deadline(number):g} s\n{stacks}"
            failed = Outcome(number, mutation, "failed", (Defect("hang", late),))
        except (EOFError, OSError):
            worker.process.join(5)
            end = f"the worker process ended with exit code {worker.process.exitcode}"
            failed = Outcome(number, mutation, "failed", (Defect("traceback", end),))
        worker.kill()
        case = Case(self.row.name, number, self.seed, mutation, worker.folder, self.shared)
        for pid in living(case.marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.workers[self.workers.index(worker)] = _Worker(self.row, self.seed, self.shared)
        return failed


def living(marker: str) -> dict[int, str]:
    """The processes that carry a case's marker, with their command lines; not this one."""
    variable = f"{MARKER}={marker}".encode()
    found: dict[int, str] = {}
    for place in Path("/proc").glob("[0-9]*"):
        if int(place.name) == os.getpid():
            continue
        with suppress(OSError):  # it has just ended, or is another user's
            if variable in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def _work(name: str, seed: int, shared: str, connection: Connection) -> None:
    """The main function of a worker: `None` asks to prepare the row, a number to run a case."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    logging.getLogger("vlarl").addHandler(logging.NullHandler())  # what is logged is not printed
    row = find_row(name)
    stacks = (Path(shared).parent / f"stacks-{os.getpid()}").open("w")
    while True:
        try:
            job = connection.recv()
        except EOFError:
            sys.exit(0)
        if job is None:
            connection.send(_prepared(row, Path(shared)))
            continue
        number, folder = job
        faulthandler.dump_traceback_later(0.9 * row.deadline(number), file=stacks)
        outcome = run_case(row, number, seed, Path(shared), Path(folder))
        faulthandler.cancel_dump_traceback_later()
        connection.send(outcome)


def _prepared(row: Row, shared: Path) -> str:
    try:
        row.prepare(shared)
    except Exception:  # noqa: BLE001 - the program under attack is called here
        return traceback.format_exc()
    return ""
