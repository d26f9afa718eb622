"""SIGKILL at any moment of a training run, also while a checkpoint is written; resumed, it equals the undisturbed run.

A run that was killed before its configuration was written is started again under its name; any other one is resumed.
"""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import Popen

from fuzz.answers import DONE, ask, judged, left_behind, start
from fuzz.harness import Case, Defect, Row
from fuzz.small_run import ITERATIONS, differences, flags, undisturbed

POLL_S = 0.0005
LIMIT_S = 100.0  # of one session that is waited for
Moment = Callable[[random.Random, Path, float], Callable[[], bool]]
"""(rng, run folder, seconds of an undisturbed session) -> whether the moment to kill has come."""


def prepare(shared: Path) -> None:
    """The undisturbed run, and how long it takes as a process."""
    undisturbed(shared)
    case = Case("kills", -1, 0, "", shared, shared)
    began = time.monotonic()
    process = start(flags(shared / "policy", shared / "timed"), shared, case)
    process.communicate()
    (shared / "seconds").write_text(str(time.monotonic() - began))


def at_a_random_moment(rng: random.Random, run: Path, seconds: float) -> Callable[[], bool]:
    moment = time.monotonic() + rng.uniform(0.0, seconds)
    return lambda: time.monotonic() >= moment


def while_a_checkpoint_is_written(rng: random.Random, run: Path, seconds: float) -> Callable[[], bool]:
    """Some time after a partial checkpoint has appeared; which one, and how long after, by chance."""
    wanted, delay = rng.randrange(1, ITERATIONS + 2), rng.choice((0.0, rng.uniform(0.0, 0.05)))
    seen: set[str] = set()

    def come() -> bool:
        folder = run / "checkpoints"
        found = {path.name for path in folder.glob(".new-*")} if folder.is_dir() else set()
        for name in found - seen:
            seen.add(name)
        if not found or len(seen) < wanted:
            return False
        time.sleep(delay)
        return True

    return come


def after_a_row(rng: random.Random, run: Path, seconds: float) -> Callable[[], bool]:
    """When metrics.jsonl has a certain row, or a moment later."""
    wanted, delay = rng.randrange(1, ITERATIONS + 1), rng.choice((0.0, rng.uniform(0.0, 0.1)))

    def come() -> bool:
        path = run / "metrics.jsonl"
        if not path.is_file() or path.read_bytes().count(b"\n") < wanted:
            return False
        time.sleep(delay)
        return True

    return come


def as_its_folder_appears(rng: random.Random, run: Path, seconds: float) -> Callable[[], bool]:
    delay = rng.choice((0.0, 0.0, rng.uniform(0.0, 0.02)))

    def come() -> bool:
        if not run.is_dir():
            return False
        time.sleep(delay)
        return True

    return come


MOMENTS: dict[str, tuple[Moment, ...]] = {
    "at a random moment": (at_a_random_moment,),
    "while a checkpoint is written": (while_a_checkpoint_is_written,),
    "after a row": (after_a_row,),
    "as its folder appears": (as_its_folder_appears,),
    "twice": (at_a_random_moment, while_a_checkpoint_is_written),
}


def run(case: Case) -> tuple[str, Sequence[Defect]]:
    """Kill a run at its moments, go on with it, and compare."""
    rng = case.rng()
    folder = case.folder / "runs" / "run"
    seconds = float((case.shared / "seconds").read_text())
    killed = 0
    for moment in MOMENTS[case.mutation]:
        process = start(_command(case, folder), case.folder, case)
        if not _killed(process, moment(rng, folder, seconds)):
            out, err = process.communicate()
            if process.returncode != DONE:
                return "failed", [Defect("wrong", f"exit code {process.returncode} of a session\n{out}{err}")]
            break
        killed += 1
    defects = left_behind(case)
    if not (folder / "checkpoints" / "final").is_dir():
        answer = ask(_command(case, folder), case.folder)
        defects += judged(answer, (DONE,), f"after {killed} kills: vlarl {' '.join(_command(case, folder)[:3])}")
        if answer.code != DONE or defects:
            return "refused", defects
    return f"killed {killed} times", [*defects, *differences(folder, case.shared / "whole" / "run")]


def _command(case: Case, folder: Path) -> list[str]:
    """What a user would do: go on with the run, or begin it where there is nothing to go on with."""
    if (folder / "config.yaml").is_file():
        return ["train", "--resume", str(folder)]
    return flags(case.shared / "policy", case.folder / "runs")


def _killed(process: Popen[str], come: Callable[[], bool]) -> bool:
    """Whether the process was killed at its moment, and had not ended before."""
    limit = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < limit:
        if come():
            process.kill()
            process.communicate()
            return True
        time.sleep(POLL_S)
    return False


ROW = Row(
    name="kills",
    about="SIGKILL of a small training run at seeded times, also twice and while a checkpoint is written; the resumed "
    "run must equal the undisturbed one to the bit: weights, optimizer, counters, metrics, episodes",
    mutations=tuple(MOMENTS),
    cases=50,
    deadline_s=300.0,
    run=run,
    prepare=prepare,
)
