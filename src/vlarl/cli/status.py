"""`vlarl status`: the status of one run or of all, read from their folders only."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from vlarl.cli import arguments as args
from vlarl.cli.runs import find_run
from vlarl.config.paths import brief, expanded
from vlarl.config.resume_command import resume_command
from vlarl.config.run_checkpoints import list_runs
from vlarl.config.words import PROMPT_WORDS, ROBOT_WORDS
from vlarl.observability.clock import duration_in_words
from vlarl.observability.run_dir import LARGEST_COUNT, RunDirectory
from vlarl.observability.terminal import printable

RECENT = 5  # iterations that the remaining time is estimated from
LOG_LINES = 8
LOG_TAIL = 16_384  # bytes of the log that are read for them
LABEL = 11


@dataclass(frozen=True)
class RunStatus:
    """The status of a run. Times are unix seconds, durations seconds; None is unknown."""

    run: str
    path: str
    state: str  # starting, running, finished, failed, interrupted; died: status.json says running, but no process
    # runs it; unreadable: status.json is damaged
    iteration: int
    iterations: int
    started: float | None
    updated: float | None
    elapsed_s: float | None
    left_s: float | None
    iteration_s: float | None
    rollout_success: float | None
    rollout_iteration: int | None
    val_success: float | None
    val_iteration: int | None
    rollout_reward: float | None  # mean return
    val_reward: float | None
    response_length: float | None  # tokens of a response; None: of a robot
    truncated_fraction: float | None  # of the responses
    message: str
    resume: str  # empty if the run can't be resumed
    pid: int | None
    host: str
    machine: str


def status(arguments: Sequence[str]) -> int:
    """Print the status of a run, or of all runs below a root."""
    parser = args.Parser("status", "Print the status of a run; without RUN one line per run, newest last.")
    parser.add_argument("run", nargs="?", metavar="RUN", help="name or folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args.add_root(parser)
    given = parser.parse_args(arguments)
    now = time.time()
    if given.run is None:
        root = expanded(given.root)
        statuses = [run_status(RunDirectory(root / name), now) for name in reversed(list_runs(root))]
        text = _as_json([asdict(s) for s in statuses]) if given.json else _table(statuses, given.root, now)
        print(printable(text))
        return 0
    run = RunDirectory(find_run(given.run, given.root))
    found, tail, logs = run_status(run, now), _tail(run.log_file), _other_logs(run)
    if given.json:
        print(printable(_as_json({**asdict(found), "log": tail, "logs": logs})))
    else:
        print(printable("\n".join(_described(found, now) + _logs_described(tail, logs))))
    return 0


def run_status(run: RunDirectory, now: float) -> RunStatus:
    """The status of a run, from its files."""
    saved = run.read_status()
    state = _state(run, saved)
    if state == "died":
        saved = run.read_status()  # it may have ended properly between reading the status and checking the process
        state = _state(run, saved)
    rows = run.read_metrics()
    iteration = max([saved.get("iteration", 0), *(_iteration(row) for row in rows[-1:])])
    iterations = saved.get("iterations", 0)
    started, updated = _number(saved, "started"), _number(saved, "updated")
    last = now if state in ("running", "starting") else updated
    times = [t for row in rows if row.get("iteration") and (t := _number(row, "time/iteration")) is not None][-RECENT:]
    iteration_s = sum(times) / len(times) if times else None
    left = None
    if state == "running" and iteration_s is not None and updated is not None:
        # The current iteration has used some of this time already.
        left = max(0.0, (iterations - iteration) * iteration_s - (now - updated))
    rollout, val = _newest(rows, "rollout/success_rate"), _newest(rows, "val/success_rate")
    reward, val_reward = _newest(rows, "rollout/mean_return"), _newest(rows, "val/mean_reward")
    return RunStatus(
        run=run.name,
        path=str(run.path),
        state=state,
        iteration=iteration,
        iterations=iterations,
        started=started,
        updated=updated,
        elapsed_s=None if started is None or last is None else last - started,
        left_s=left,
        iteration_s=iteration_s,
        rollout_success=rollout[1],
        rollout_iteration=rollout[0] if rollout[0] is not None else reward[0],
        val_success=val[1],
        val_iteration=val[0] if val[0] is not None else val_reward[0],
        rollout_reward=reward[1],
        val_reward=val_reward[1],
        response_length=_newest(rows, "rollout/response_length")[1],
        truncated_fraction=_newest(rows, "rollout/truncated_fraction")[1],
        message=run.status_problem() or (saved.get("message", "") if saved else "it has not written a status.json"),
        resume=resume_command(run.path) if saved.get("resume", True) else "",
        pid=saved.get("pid"),
        host=str(saved.get("host") or ""),
        machine=str(saved.get("machine") or ""),
    )


def _state(run: RunDirectory, saved: Mapping[str, Any]) -> str:
    """The state in status.json, or `died` if the process ended without writing its state."""
    if run.status_problem():
        return "unreadable"
    state = str(saved.get("state") or "starting")
    return "died" if state in ("running", "starting") and not _is_running(run, saved) else state


def _is_running(run: RunDirectory, saved: Mapping[str, Any]) -> bool:
    """Whether a process works on the run: by its lock; without one, by its pid on this machine; else assumed."""
    locked = run.is_locked()
    if locked is not None:
        return locked
    if saved.get("host") not in (None, socket.gethostname()):
        return True
    try:
        os.kill(int(saved["pid"]), 0)  # sends nothing
    except (KeyError, ProcessLookupError):
        return False
    except PermissionError:  # it exists and is another user's
        return True
    return True


def _number(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if is_number else None  # type: ignore[arg-type]


def _iteration(row: Mapping[str, Any]) -> int:
    value = row.get("iteration")
    return value if isinstance(value, int) and 0 <= value <= LARGEST_COUNT else 0


def _newest(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[int | None, float | None]:
    """Iteration and value of the last row with this key."""
    for row in reversed(rows):
        if (value := _number(row, key)) is not None:
            return _iteration(row), value
    return None, None


def _tail(path: Path) -> list[str]:
    """The newest lines of a log."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL))
        return file.read().decode("utf-8", errors="replace").splitlines()[-LOG_LINES:]


def _other_logs(run: RunDirectory) -> list[dict[str, str | int]]:
    """Name and size of the logs of workers and of a detached run's output."""
    paths = sorted(path for path in run.logs.glob("*.log") if path != run.log_file)
    return [{"name": path.name, "bytes": path.stat().st_size} for path in paths]


def _as_json(content: object) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False)


def _table(statuses: Sequence[RunStatus], root: str, now: float) -> str:
    """One line per run; its name comes last, so that it is never truncated."""
    if not statuses:
        return f"no runs in {root}/"
    rows = [("state", "iteration", "val", "ago", "run")]
    for s in statuses:
        ago = "-" if s.updated is None else _short(now - s.updated)
        rows.append((s.state, f"{s.iteration}/{s.iterations}", _val(s), ago, s.run))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join([*(f"{c:<{w}}" for c, w in zip(row[:4], widths, strict=True)), row[4]]) for row in rows)


def _described(s: RunStatus, now: float) -> list[str]:
    """The status of a run as text, one fact per line."""
    facts = [("run", brief(s.path)), ("state", s.state), ("iteration", f"{s.iteration} of {s.iterations}")]
    if s.state in ("running", "starting") and s.pid is not None:
        facts[1] = ("state", f"{s.state}, pid {s.pid} on {s.host}")
    if s.started is not None and s.updated is not None and s.elapsed_s is not None:
        facts.append(("started", f"{_date(s.started)}, {duration_in_words(s.elapsed_s)} elapsed"))
        facts.append(("updated", f"{_date(s.updated)}, {duration_in_words(now - s.updated)} ago"))
    if s.left_s is not None and s.iteration_s is not None:
        facts.append(("left", f"about {duration_in_words(s.left_s)}, at {s.iteration_s:.1f} s per iteration"))
    words = ROBOT_WORDS if s.response_length is None else PROMPT_WORDS
    facts += _figures(s, words.success, s.rollout_success, s.val_success, "{:.1%}")
    if s.response_length is not None:
        facts += _figures(s, words.reward, s.rollout_reward, s.val_reward, "{:.3f}")
        cut_off = f", {s.truncated_fraction:.0%} cut off" if s.truncated_fraction else ""
        facts.append(("length", f"{s.response_length:.1f} tokens{cut_off}"))
    if s.machine:
        facts.append(("machine", s.machine))
    if s.message:
        facts.append(("message", s.message))
    lines = [line for label, fact in facts for line in _fact(label, fact)]
    if s.resume and s.state in ("failed", "interrupted", "died"):
        lines.append(f"{'resume':<{LABEL}}{s.resume}")  # on one line, to be copied
    return lines


def _figures(s: RunStatus, label: str, rollout: float | None, val: float | None, form: str) -> list[tuple[str, str]]:
    """A value of the newest rollout and of the newest evaluation, as far as they are there."""
    facts = []
    if rollout is not None:
        facts.append((label, f"{form.format(rollout)} in the rollout of iteration {s.rollout_iteration}"))
    if val is not None:
        when = f"after iteration {s.val_iteration}" if s.val_iteration else "before training"
        facts.append((label if rollout is None else "", f"{form.format(val)} evaluated {when}"))
    return facts


def _fact(label: str, text: str) -> list[str]:
    parts, width = [text], _columns()
    if width is not None:
        parts = textwrap.wrap(text, width - LABEL, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{name:<{LABEL}}{part}" for name, part in zip([label, *[""] * len(parts)], parts, strict=False)]


def _logs_described(tail: Sequence[str], logs: Sequence[Mapping[str, str | int]]) -> list[str]:
    lines = ["", "logs/train.log"] if tail else []
    width = _columns()
    lines += [f"  {line if width is None or len(line) <= width - 2 else line[: width - 3] + '…'}" for line in tail]
    if logs:
        width = max(len(str(log["name"])) for log in logs)
        lines += ["", "other logs", *(f"  {log['name']:<{width}}  {_size(int(log['bytes'])):>8}" for log in logs)]
    return lines


def _columns() -> int | None:
    """The width of the terminal; None if the output goes to a file or a program, where lines are not wrapped."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return None
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def _val(s: RunStatus) -> str:
    """The newest success rate; of prompts without solutions, the reward."""
    if s.val_success is not None:
        return f"{s.val_success:.1%}"
    return "-" if s.response_length is None or s.val_reward is None else f"{s.val_reward:.3f}"


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def _short(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h` or `5 d`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _size(count: int) -> str:
    """A size in B, kB or MB."""
    return f"{count} B" if count < 1000 else f"{count / 1000:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"
