"""Environments that fail in every way we know of, in whole runs.

A fault that happens once changes nothing but counters: the episode is run again. One that happens always ends the run
with a message that names it. Whatever happens, no process outlives the run, and nothing is left in the working folder.
"""

import json
import random
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from fuzz.answers import DONE, FAILED, INTERRUPTED, REFUSED, Answer, ask_process, judged, left_behind, litter, start
from fuzz.fault_envs import ACTS, HARMLESS, SHOWN, STEPS, SUCCESS
from fuzz.harness import Case, Defect, Row
from fuzz.small_run import rows

DEADLINE_S = 150.0
STOP_S = 20.0  # from the second Ctrl-C to the end of the process
TIMEOUT_S = "12"  # env.timeout_s where something hangs: a process needs seconds to start on a busy machine
MESSAGE_CHARACTERS = 20_000
LOG_BYTES = 5_000_000

GYM = [
    *("--env.suite", "gym", "--gym.env", "fuzz.fault_envs:Faulty", "--gym.images", "pixels.front"),
    *("--gym.proprio", "state", "goal", "state", "goal", "--gym.actions", "0", "1"),
    *("--gym.instructions", "go to the right goal", "--env.max_steps", "8", "--policy.path", "builtin:tiny-oft"),
]
SIZES = [
    *("--run.iterations", "1", "--run.num_threads", "1", "--run.device", "cpu", "--env.num_envs", "2"),
    *("--rollout.num_groups", "2", "--rollout.group_size", "2", "--eval.states_per_task", "2", "--eval.videos", "0"),
    *("--env.lockstep", "--env.retries", "1", "--no-logging.tensorboard", "--no-logging.report"),
    *("--reward.source", "dense"),
]

ALWAYS_ONLY = (
    *("making it hangs", "making it calls sys.exit", "reset hangs", "reset calls sys.exit", "reset raises"),
    *("close hangs", "close raises"),
)
TOLERATED = (*HARMLESS, "close hangs", "close raises")
BROKEN = (*ACTS, *SHOWN, *SUCCESS, *STEPS)
ENDLESS = ("hangs", "hangs and holds the GIL", "is stopped", "starts a child", "starts a detached child")
SLOW = ("hang", "stopped")
COUNTS_AGAIN = re.compile("retried|retries")  # names of what counts episodes that were run again

MUTATIONS = (
    *(f"always: {fault}" for fault in (*BROKEN, *TOLERATED, *(f for f in ALWAYS_ONLY if f not in TOLERATED))),
    *(f"once: {fault}" for fault in (*BROKEN, *HARMLESS)),
    *(f"trainer killed: {fault}" for fault in ENDLESS),
    *(f"Ctrl-C twice: {fault}" for fault in ("hangs", "hangs and holds the GIL")),
)


def prepare(shared: Path) -> None:
    """The run that nothing disturbs."""
    case = Case("environments", -1, 0, "", shared, shared)
    answer = ask_process(_command(case, "nothing", once=False), shared, 600.0, case)
    if not isinstance(answer, Answer) or answer.code != DONE:
        raise RuntimeError(f"the undisturbed run fails: {answer}")


def _command(case: Case, fault: str, once: bool) -> list[str]:
    diary = case.folder / "diary"
    diary.mkdir()
    kwargs = json.dumps({"fault": fault, "diary": str(diary), "once": once})
    timeout = ("--env.timeout_s", TIMEOUT_S) if any(word in fault for word in SLOW) else ()
    place = ("--run.root", str(case.folder / "runs"), "--run.name", "run")
    return ["train", *GYM, *SIZES, "--gym.kwargs", kwargs, *timeout, *place]


def run(case: Case) -> tuple[str, Sequence[Defect]]:
    """A run with an environment that misbehaves."""
    how, _, fault = case.mutation.partition(": ")
    work = case.folder / "work"
    work.mkdir()
    command = _command(case, fault, once=how == "once")
    if how in ("trainer killed", "Ctrl-C twice"):
        answer, defects = _stopped(case, command, work, how, case.rng())
    else:
        answer, defects = _whole(case, command, work, how, fault)
    return answer, [*defects, *left_behind(case), *litter(work, ())]


def _whole(case: Case, command: list[str], work: Path, how: str, fault: str) -> tuple[str, list[Defect]]:
    answer = ask_process(command, work, DEADLINE_S, case)
    if isinstance(answer, Defect):
        return "hung", [answer]
    run = case.folder / "runs" / "run"
    goes_on = how == "once" or fault in TOLERATED
    defects = judged(answer, (DONE,) if goes_on else (FAILED, REFUSED), case.mutation)
    if len(answer.text) > MESSAGE_CHARACTERS:
        defects.append(Defect("wrong", f"{len(answer.text):,} characters are printed"))
    if (logs := sum(path.stat().st_size for path in run.glob("logs/*"))) > LOG_BYTES:
        defects.append(Defect("wrong", f"{logs:,} bytes of logs"))
    if not goes_on and not defects:
        defects += _named(answer, fault)
    if answer.code == DONE and not defects:
        defects += _same(case, run)
    return ("worked" if answer.code == DONE else "refused"), defects


def _named(answer: Answer, fault: str) -> list[Defect]:
    """The message names the cause: never advice about the optimizer."""
    if "optim.lr" in answer.text:
        return [Defect("wrong", f"an environment's fault ({fault}) is answered with optim.lr\n{answer.text}")]
    said = {
        "raises": "exploded",
        "calls sys.exit": "goodbye",
        "is killed": "SIGKILL",
        "crashes": "SIGSEGV",
        "hangs": "did not reply within",
        "success is 'no'": "success",
        "success is missing": "success",
        "state is NaN": "state",
        "state is missing": "state",
        "reset raises": "no reset today",
    }.get(fault, "")
    return [] if said in answer.text else [Defect("wrong", f"{fault}: the message lacks {said!r}\n{answer.text}")]


def _same(case: Case, run: Path) -> list[Defect]:
    """Rows as those of the undisturbed run, but for the count of episodes that were run again."""

    def stripped(folder: Path, name: str) -> list[str]:
        """In an order of their own: an episode that is run again ends later."""
        kept = [{k: v for k, v in row.items() if not COUNTS_AGAIN.search(k)} for row in rows(folder / name)]
        return sorted(json.dumps(row, sort_keys=True) for row in kept)

    whole = case.shared / "runs" / "run"
    different = [name for name in ("metrics.jsonl", "episodes.jsonl") if stripped(run, name) != stripped(whole, name)]
    if not different:
        return []
    return [Defect("wrong", f"the fault changed {', '.join(different)}")]


def _stopped(case: Case, command: list[str], work: Path, how: str, rng: random.Random) -> tuple[str, list[Defect]]:
    """Kill or interrupt the trainer once the fault has happened."""
    process = start([*command, "--env.timeout_s", "600"], work, case)
    happened = case.folder / "diary" / "happened"
    limit = time.monotonic() + DEADLINE_S
    while not happened.exists() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(rng.uniform(0.0, 0.5))
    if how == "trainer killed":
        process.kill()
        process.wait()
        return "killed", []
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    limit = time.monotonic() + STOP_S
    while process.poll() is None and time.monotonic() < limit:
        time.sleep(0.05)
    if process.poll() is None:
        process.kill()
        return "hung", [Defect("hang", f"not ended {STOP_S:g} s after a second Ctrl-C")]
    out, err = process.communicate()
    return "interrupted", judged(Answer(process.returncode, out, err), (INTERRUPTED,), case.mutation)


ROW = Row(
    name="environments",
    about="Gymnasium environments that raise, exit, crash, hang, hold the GIL, show NaN, leave out keys, or call "
    "something else than a truth value success; always or once; children that outlive; a trainer that is killed",
    mutations=MUTATIONS,
    cases=len(MUTATIONS),
    deadline_s=200.0,
    run=run,
    prepare=prepare,
)
