"""What an environment costs: memory and time."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

from vlarl.envs.check.findings import Findings, Subject, breach, note, passed

Result = TypeVar("Result")

NUM_EPISODES, NUM_STEPS = 3, 8  # timed
NUM_RESETS = 10  # over which memory is watched
LEAK_BYTES = 1_000_000  # a reset; a run has thousands
STATM = Path("/proc/self/statm")


def memory(subject: Subject) -> Findings:
    """Whether each reset takes memory that it doesn't give back."""

    def grown() -> float:
        before = _resident_bytes()
        for state in range(NUM_RESETS):
            subject.env.reset(subject.task(state))
            subject.env.step(subject.actions(1)[0])
            subject.env.observe()
        if _resident_bytes() - before > NUM_RESETS * LEAK_BYTES:
            gc.collect()  # slow, so it runs only where it matters
        return (_resident_bytes() - before) / NUM_RESETS

    if not STATM.exists():
        return
    growth = min(grown(), grown())  # memory taken once and kept is not a leak
    if growth > LEAK_BYTES:
        remedy = "release what an episode took; a simulator that can't should be rebuilt less often, or reset softly"
        yield breach(f"memory: each reset takes {growth / 1e6:.1f} MB more", remedy)
    else:
        yield passed(f"memory: steady over {2 * NUM_RESETS} resets")


def _resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def speed(subject: Subject) -> Findings:
    """How long each call takes."""
    env = subject.env
    times: dict[str, list[float]] = {"a reset": [], "a step": [], "an observation": []}

    def timed(name: str, call: Callable[[], Result]) -> Result:
        begin = time.perf_counter()
        result = call()
        times[name].append(1000 * (time.perf_counter() - begin))
        return result

    for episode in range(NUM_EPISODES):
        timed("a reset", lambda state=episode: env.reset(subject.task(state)))  # type: ignore[misc]
        for action in subject.actions(NUM_STEPS):
            step = timed("a step", lambda given=action: env.step(given))  # type: ignore[misc]
            if step.terminated or step.truncated:
                break
        timed("an observation", env.observe)
    yield note("speed: " + ", ".join(f"{name} {median(each):.1f} ms" for name, each in times.items()))
