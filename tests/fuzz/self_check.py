"""A row that attacks nothing: each of its cases has the defect that its name says, so that the harness can be tested."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from fuzz.answers import Answer, judged, left_behind, litter
from fuzz.harness import MARKER, Case, Defect, Row

TRACEBACK = "Traceback (most recent call last):\n  ...\nKeyError: 'x'"


def run(case: Case) -> tuple[str, Sequence[Defect]]:
    """Do what the name says."""
    match case.mutation:
        case "raises":
            raise KeyError("x")
        case "prints a traceback":
            return "failed", judged(Answer(2, "", f"error: {TRACEBACK}"))
        case "hangs":
            time.sleep(600)
        case "dies":
            os._exit(9)
        case "exits with another code":
            return "failed", judged(Answer(1, "", "error: no"))
        case "says nothing":
            return "failed", judged(Answer(2, "", ""))
        case "leaves a file":
            (case.folder / "MUJOCO_LOG.TXT").touch()
            return "worked", litter(case.folder, ("mine.yaml",))
        case "leaves a process":
            child = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
            environ = {**os.environ, MARKER: case.marker}
            left = subprocess.Popen(child, start_new_session=True, env=environ, stdout=subprocess.PIPE)
            assert left.stdout is not None and left.stdout.readline(), "a process that is just starting shows no marker"
            return "worked", left_behind(case, grace_s=0.5)
    return "worked", judged(Answer(0, "fine", ""))


EXPECTED = {
    "works": (),
    "raises": ("traceback",),
    "prints a traceback": ("traceback",),
    "hangs": ("hang",),
    "dies": ("traceback",),
    "exits with another code": ("wrong",),
    "says nothing": ("wrong",),
    "leaves a file": ("wrong",),
    "leaves a process": ("wrong",),
}
"""The defects that the harness must find in each case."""

ROW = Row("self_check", "the harness itself", tuple(EXPECTED), len(EXPECTED), 60.0, run, deadlines={"hangs": 3.0})
