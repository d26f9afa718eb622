"""Rewards that fail in every way we know of: functions and modules of a user in whole runs, services that speak HTTP badly.

A reward that always fails ends the run with its cause. A service never holds a request longer than reward.timeout_s.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fuzz.answers import DONE, FAILED, REFUSED, Answer, ask_process, judged, left_behind, litter
from fuzz.harness import Case, Defect, Row
from fuzz.hostile_service import BEHAVIOURS, HostileService
from fuzz.small_run import flags, make_checkpoint

from vlarl.errors import VlarlError
from vlarl.rewards.remote import RemoteReward
from vlarl.rewards.safe import SafeReward
from vlarl.types import Observation, Task, Trajectory, Transition

DEADLINE_S = 120.0
TIMEOUT_S, SLACK_S = 0.5, 4.0  # of a request; more than it may take on a busy machine
EPISODES = 4
MESSAGE_CHARACTERS = 20_000
LOG_BYTES = 5_000_000

CAUSES = {
    "raises": "the judge is out",
    "raises_what_is_no_exception": "the judge is strange",
    "raises_50_mb_of_text": "xxx",
    "exits": "the judge goes home",
    "exits_with_0": "exit",
    "recurses": "recursion",
    "out_of_memory": "the judge is full",
    "not_a_number": "nan",
    "infinite": "inf",
    "text": "'good'",
    "nothing": "None",
    "array": "array",
    "complex_number": "(1+2j)",
    "takes_nothing": "argument",
    "hangs": "reward.timeout_s",
}
"""Functions of fault_rewards.py, and what the message must say."""

AT_ONCE = ("takes_nothing",)  # which their signature tells, before anything is run
WORKING = ("right", "of_numpy", "prints", "fails_now_and_then")
MODULES = {
    "raises on import": "raise RuntimeError('no judge today')",
    "exits on import": "import sys; sys.exit('no judge today')",
    "exits with 0 on import": "import sys; sys.exit(0)",
    "is no Python": "def score(:",
    "has null bytes": "\x00",
    "imports what is not there": "import surely_not_installed",
    "has no such function": "x = 1",
    "raises what is no Exception on import": "raise BaseException('no judge today')",
}
WHOLE_RUNS = ("closes at once", "drips its status line", "sends deep JSON", "sends an integer of 400 digits", "answers")

MUTATIONS = (
    *(f"function: {name}" for name in (*CAUSES, *WORKING)),
    *(f"module: {name}" for name in MODULES),
    *(f"service: {name}" for name in BEHAVIOURS),
    *(f"run with a service: {name}" for name in WHOLE_RUNS),
)


def prepare(shared: Path) -> None:
    """The policy of the runs."""
    make_checkpoint(shared)


def run(case: Case) -> tuple[str, Sequence[Defect]]:
    """One reward."""
    kind, _, name = case.mutation.partition(": ")
    if kind == "service":
        return _service(name)
    work = case.folder / "work"
    work.mkdir()
    if kind == "module":
        (work / "my_reward.py").write_text(MODULES[name])
        answer = _train(case, work, "my_reward:score")
        expected: tuple[int, ...] = (REFUSED,)
        name = ""
    elif kind == "function":
        limit = ("--reward.timeout_s", "2") if name == "hangs" else ()
        answer = _train(case, work, f"fuzz.fault_rewards:{name}", *limit)
        expected = (DONE,) if name in WORKING else (REFUSED,) if name in AT_ONCE else (FAILED,)
    else:
        with HostileService(name) as service:
            answer = _train(case, work, "remote", "--reward.url", service.url, "--reward.timeout_s", "1")
        expected = (DONE,) if name == "answers" else (FAILED,)
    return _judged(case, work, answer, expected, CAUSES.get(name, ""))


def _train(case: Case, work: Path, source: str, *extra: str) -> Answer | Defect:
    size = (
        "--reward.source",
        source,
        "--reward.retries",
        "0",
        "--run.iterations",
        "1",
        "--reward.max_failure_rate",
        "0.9",
    )
    command = flags(case.shared / "policy", case.folder / "runs", *size, *extra)
    return ask_process(command, work, DEADLINE_S, case)


def _judged(
    case: Case, work: Path, answer: Answer | Defect, expected: tuple[int, ...], cause: str
) -> tuple[str, list[Defect]]:
    if isinstance(answer, Defect):
        return "hung", [answer, *left_behind(case)]
    shutil.rmtree(work / "__pycache__", ignore_errors=True)
    defects = [*judged(answer, expected, case.mutation), *left_behind(case), *litter(work, ("my_reward.py",))]
    if not defects and cause not in answer.text:
        defects.append(Defect("wrong", f"the message lacks the cause, {cause!r}:\n{answer.text}"))
    if len(answer.err) > MESSAGE_CHARACTERS:
        defects.append(Defect("wrong", f"{len(answer.err):,} characters of messages"))
    logs = sum(path.stat().st_size for path in (case.folder / "runs" / "run").glob("logs/*"))
    if logs > LOG_BYTES:
        defects.append(Defect("wrong", f"{logs:,} bytes of logs"))
    if answer.code == REFUSED and (case.folder / "runs").exists():
        defects.append(Defect("wrong", "a run that was refused leaves a folder"))
    return ("worked" if answer.code == DONE else "refused"), defects


def _service(name: str) -> tuple[str, list[Defect]]:
    """Ask a service once for some episodes."""
    with HostileService(name) as service:
        remote = RemoteReward(service.url, timeout_s=TIMEOUT_S, retries=0)
        reward = SafeReward(remote, retries=0, max_failure_rate=1.0)
        began = time.monotonic()
        try:
            scored = reward.score_all([_episode(number) for number in range(EPISODES)])
        except VlarlError as error:
            scored, message = [], str(error)
        else:
            message = "; ".join(episode.reward_error or "" for episode in scored)
        seconds = time.monotonic() - began
    defects = []
    # SafeReward may ask again for each episode alone, to find the one that a failure is about.
    if seconds > (EPISODES + 1) * TIMEOUT_S + SLACK_S:
        defects.append(Defect("hang", f"{name}: {seconds:.1f} s with reward.timeout_s = {TIMEOUT_S}"))
    if len(message) > MESSAGE_CHARACTERS:
        defects.append(Defect("wrong", f"{name}: a message of {len(message):,} characters"))
    if name == "answers":
        paid = [float(sum(t.rewards.sum() for t in episode.transitions)) for episode in scored]
        if paid != [0.5] * EPISODES:
            defects.append(Defect("wrong", f"a service that answers is not heard: {paid}, {message}"))
    elif any(episode.reward_error is None for episode in scored):
        defects.append(Defect("wrong", f"{name}: taken for a score"))
    return ("worked" if name == "answers" else "refused"), defects


def _episode(number: int) -> Trajectory:
    seen = Observation(np.zeros((1, 8, 8, 3), np.uint8), np.zeros(8, np.float32), "reach")
    step = Transition(seen, np.zeros(7, np.int64), np.zeros(7, np.float32), np.zeros(1, np.float32), 1)
    task = Task("tabletop_spatial", 0, 0, number, number)
    return Trajectory(task, (step,), seen, False, True, False, 0)


ROW = Row(
    name="rewards",
    about="functions that raise, exit, hang or return something else than a number, modules that can't be imported, and "
    "services that drip, close, never end or send something else than scores",
    mutations=MUTATIONS,
    cases=len(MUTATIONS),
    deadline_s=180.0,
    deadlines={"service": 15.0},
    run=run,
    prepare=prepare,
)
