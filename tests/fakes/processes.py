"""Looking at the processes of a run from outside."""

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
MODULES = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
"""PYTHONPATH of a run that finds these fakes, and the vlarl that is tested, wherever another one is installed."""


def simulators(pid: int) -> list[int]:
    """The simulator processes of a trainer."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"vlarl.envs.env_process" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:  # it has just ended
            continue
    return sorted(found)
