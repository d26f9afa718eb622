"""Versions of MuJoCo that render and simulate LIBERO as in published checkpoints and results."""

from __future__ import annotations

import re

KNOWN_GOOD_MUJOCO = ("3.3.0", "3.3.1", "3.3.2")


def mujoco_problem(version: str) -> str | None:
    """What is wrong with LIBERO in a version of MuJoCo, with the remedy; None if nothing is."""
    if version in KNOWN_GOOD_MUJOCO:
        return None
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if parts >= (3, 4):
        harm = "LIBERO's floors are rendered darker and task 5 of libero_spatial is broken"
    elif parts >= (3, 3, 3):
        harm = "LIBERO's floors are rendered darker than in the checkpoints' training data"
    else:
        harm = "LIBERO was not tested with it"
    oldest, newest = KNOWN_GOOD_MUJOCO[0], KNOWN_GOOD_MUJOCO[-1]
    return f"{harm}, so that success rates can't be compared; run: pip install 'mujoco>={oldest},<={newest}'"
