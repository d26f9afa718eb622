"""Checks an environment against the contract of `envs/base.py`, and reports each breach with its fix.

Behind `vlarl env check`. It plays short episodes of random actions, so it can't see everything: whether an image is
upright, and whether success is right, is left to the reader.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from vlarl.envs.check.costs import memory, speed
from vlarl.envs.check.episodes import ending, kept, replay, states, steps, success
from vlarl.envs.check.findings import Finding, Findings, SlotEnv, Subject, breach, note
from vlarl.envs.check.looks import first_look, images, proprio_and_instruction, suite
from vlarl.errors import describe_error

__all__ = ["Finding", "SlotEnv", "Subject", "check_env"]

CHECKS: dict[str, Callable[[Subject], Findings]] = {
    "images": images,
    "observation": proprio_and_instruction,
    "steps": steps,
    "kept": kept,
    "replay": replay,
    "states": states,
    "ending": ending,
    "success": success,
    "memory": memory,
    "speed": speed,
}


def check_env(subject: Subject) -> Findings:
    """Check everything that the contract requires, and yield each finding as it is made."""
    yield from _guarded("suite", suite, subject)
    started = True
    for finding in _guarded("first look", first_look, subject):
        started = started and finding.kind != "breach"
        yield finding
    if not started:
        yield note("the rest can't be checked before that is fixed")
        return
    for name, check in CHECKS.items():
        yield from _guarded(name, check, subject)


def _guarded(name: str, check: Callable[[Subject], Findings], subject: Subject) -> Findings:
    """What a check finds; what the environment raises is a finding too."""
    try:
        yield from check(subject)
    except (Exception, SystemExit) as error:  # the boundary to the code under test
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        remedy = (
            "an environment that raises counts as crashed: its episode is run again, and given up after env.retries"
        )
        yield breach(f"{name}: {describe_error(error)} ({where})", remedy)
