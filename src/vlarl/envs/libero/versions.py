"""Which versions of MuJoCo show LIBERO as checkpoints and published results know it."""

from __future__ import annotations

import re

KNOWN_GOOD_MUJOCO = ("3.3.0", "3.3.1", "3.3.2")


def mujoco_problem(version: str) -> str | None:
    """What a version of MuJoCo does to LIBERO, with the remedy; None where it does nothing."""
    if version in KNOWN_GOOD_MUJOCO:
        return None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers >= (3, 4):
        harm = "LIBERO's floors are drawn darker and task 5 of libero_spatial is broken"
    elif numbers >= (3, 3, 3):
        harm = "LIBERO's floors are drawn darker than checkpoints have seen them"
    else:
        harm = "LIBERO was not tried with it"
    oldest, newest = KNOWN_GOOD_MUJOCO[0], KNOWN_GOOD_MUJOCO[-1]
    return f"{harm}, so that success rates can't be compared; run: pip install 'mujoco>={oldest},<={newest}'"
