"""Holds an environment against the contract of `envs/base.py`, and says in words what breaks it and what mends it.

Behind `vlarl env check`. It plays short episodes of random actions, so it can't see everything: whether a picture is
upright, and whether success is what it should be, is left to the reader.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from vlarl.envs.check.costs import memory, speed
from vlarl.envs.check.episodes import ending, kept, replay, states, steps, success
from vlarl.envs.check.findings import Finding, Findings, SlotEnv, Subject, breach, note
from vlarl.envs.check.looks import first_look, numbers_and_words, pictures, suite
from vlarl.errors import describe_error

__all__ = ["Finding", "SlotEnv", "Subject", "check_env"]

CHECKS: dict[str, Callable[[Subject], Findings]] = {
    "pictures": pictures,
    "observation": numbers_and_words,
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
    """Look at everything that the contract asks of an environment, and tell what is found as it is found."""
    yield from _guarded("suite", suite, subject)
    started = True
    for finding in _guarded("first look", first_look, subject):
        started = started and finding.kind != "breach"
        yield finding
    if not started:
        yield note("the rest can't be checked before that is mended")
        return
    for name, look in CHECKS.items():
        yield from _guarded(name, look, subject)


def _guarded(name: str, look: Callable[[Subject], Findings], subject: Subject) -> Findings:
    """What a check finds; what the environment raises is a finding too."""
    try:
        yield from look(subject)
    except (Exception, SystemExit) as error:  # the border to code that is being judged
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        remedy = "an environment that raises counts as crashed: its episode is run again, and then given up"
        yield breach(f"{name}: {describe_error(error)} ({place})", remedy)
