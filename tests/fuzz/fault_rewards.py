"""Rewards that misbehave, one function each, as a user would name them by `--reward.source`."""

import sys
import time
import zlib
from typing import Any

import numpy as np

from vlarl.types import Trajectory

LONG_S = 3600


class StrangeError(BaseException):
    """What `except Exception` does not catch."""


def right(trajectory: Trajectory) -> float:
    return zlib.crc32(trajectory.final_observation.proprio.tobytes()) / 2**32


def of_numpy(trajectory: Trajectory) -> Any:
    return np.float32(right(trajectory))


def prints(trajectory: Trajectory) -> float:
    print("x" * 1_000_000)
    return right(trajectory)


def fails_now_and_then(trajectory: Trajectory) -> float:
    if zlib.crc32(trajectory.task.episode_id.encode()) % 4 == 0:
        raise ConnectionError("now and then")
    return right(trajectory)


def raises(trajectory: Trajectory) -> float:
    raise KeyError("the judge is out")


def raises_what_is_no_exception(trajectory: Trajectory) -> float:
    raise StrangeError("the judge is strange")


def raises_50_mb_of_text(trajectory: Trajectory) -> float:
    raise ValueError("x" * 50_000_000)


def exits(trajectory: Trajectory) -> float:
    sys.exit("the judge goes home")


def exits_with_0(trajectory: Trajectory) -> float:
    sys.exit(0)


def recurses(trajectory: Trajectory) -> float:
    return recurses(trajectory)


def out_of_memory(trajectory: Trajectory) -> float:
    raise MemoryError("the judge is full")


def not_a_number(trajectory: Trajectory) -> float:
    return float("nan")


def infinite(trajectory: Trajectory) -> float:
    return float("inf")


def text(trajectory: Trajectory) -> Any:
    return "good"


def nothing(trajectory: Trajectory) -> Any:
    return None


def array(trajectory: Trajectory) -> Any:
    return np.zeros(3)


def complex_number(trajectory: Trajectory) -> Any:
    return 1 + 2j


def takes_nothing() -> float:
    return 1.0


def hangs(trajectory: Trajectory) -> float:
    time.sleep(LONG_S)
    return 0.0


not_callable = 7
