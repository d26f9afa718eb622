"""A Gymnasium environment that misbehaves in one named way, at the third step of its episodes or where the name says.

An observation misbehaves where the policy looks at it: within a chunk of actions nothing reads it.

`once`: the fault happens in one episode of all processes, and the run must come out as if it had not. A file in the
folder `diary` says that it has happened.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fakes.gym_envs import Reach

LONG_S = 3600
FLOOD_BYTES = 50_000_000
STEP = 3
LOOKED_AT = 4  # builtin:tiny-oft's chunk


class StrangeError(BaseException):
    """What `except Exception` does not catch."""


def hold_the_gil() -> None:
    """Sleep in C without giving the interpreter to another thread."""
    ctypes.PyDLL(None).sleep(LONG_S)


def raise_error(error: BaseException) -> None:
    raise error


def start_child() -> None:
    """A process that nobody waits for."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG_S})"])


def start_detached_child() -> None:
    """The same with a session of its own, so that no signal to a group reaches it."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG_S})"], start_new_session=True)


ACTS: dict[str, Callable[[], object]] = {
    "raises": lambda: raise_error(ArithmeticError("the joints exploded")),
    "raises what is no Exception": lambda: raise_error(StrangeError("very strange")),
    "raises 50 MB of text": lambda: raise_error(ValueError("x" * FLOOD_BYTES)),
    "calls sys.exit": lambda: sys.exit("the simulator says goodbye"),
    "calls sys.exit with 0": lambda: sys.exit(0),
    "calls os._exit": lambda: os._exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hangs": lambda: time.sleep(LONG_S),
    "hangs and holds the GIL": hold_the_gil,
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
"""Faults that something else than a step happens."""

SHOWN: dict[str, Callable[[dict[str, Any]], object]] = {
    "state is NaN": lambda seen: seen.update(state=np.full(2, np.nan, np.float32)),
    "state is infinite": lambda seen: seen.update(state=np.full(2, np.inf, np.float32)),
    "state is text": lambda seen: seen.update(state="here"),
    "state is longer": lambda seen: seen.update(state=np.zeros(3, np.float32)),
    "state is missing": lambda seen: seen.pop("state"),
    "image is NaN": lambda seen: seen.update(pixels={"front": np.full((20, 20, 3), np.nan)}),
    "image is empty": lambda seen: seen.update(pixels={"front": np.zeros((0, 0, 3), np.uint8)}),
    "image is missing": lambda seen: seen.update(pixels={}),
    "image is a list": lambda seen: seen.update(pixels=[1, 2]),
}
"""Faults of an observation."""

SUCCESS: dict[str, Any] = {
    "success is 'no'": "no",
    "success is NaN": float("nan"),
    "success is 2": 2,
    "success is -1": -1,
    "success is None": None,
    "success is a list": [True, False],
    "success is 0.5": 0.5,
}
"""Faults of info["success"], none of which is a success."""

STEPS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "reward is NaN": lambda step: (step[0], float("nan"), *step[2:]),
    "reward is text": lambda step: (step[0], "much", *step[2:]),
    "success is missing": lambda step: (*step[:4], {}),
    "info is None": lambda step: (*step[:4], None),
    "step has four parts": lambda step: step[:4],
    "step is None": lambda step: None,
}
"""Faults of what step() returns."""

HARMLESS: dict[str, Callable[[], object]] = {
    "starts a child": start_child,
    "starts a detached child": start_detached_child,
    "prints 50 MB": lambda: print("x" * FLOOD_BYTES, flush=True),
    "starts a thread": lambda: threading.Thread(target=time.sleep, args=(LONG_S,)).start(),
    "nothing": lambda: None,
}
"""What a run goes on after, and must not be outlived by."""


class Faulty(Reach):
    """`Reach` with a fault."""

    def __init__(self, fault: str, diary: str, once: bool = False) -> None:
        super().__init__()
        self.wanted, self.diary, self.only_once = fault, Path(diary), once
        if fault == "making it hangs":
            time.sleep(LONG_S)
        if fault == "making it calls sys.exit":
            sys.exit("no robot")

    def due(self) -> bool:
        """Whether the fault is to happen now; notes that it does."""
        step = LOOKED_AT if self.wanted in SHOWN else STEP
        if self.num_steps != step or (self.only_once and (self.diary / "happened").exists()):
            return False
        (self.diary / "happened").touch()
        return True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        if self.wanted == "reset hangs":
            time.sleep(LONG_S)
        if self.wanted == "reset calls sys.exit":
            sys.exit("no reset today")
        if self.wanted == "reset raises":
            raise ArithmeticError("no reset today")
        return super().reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> Any:
        step = super().step(action)
        if not self.due():
            return step
        for acts in (ACTS, HARMLESS):
            if self.wanted in acts:
                acts[self.wanted]()
        if self.wanted in SHOWN:
            SHOWN[self.wanted](step[0])
        if self.wanted in SUCCESS:
            step[4]["success"] = SUCCESS[self.wanted]
        return STEPS[self.wanted](step) if self.wanted in STEPS else step

    def close(self) -> None:
        if self.wanted == "close hangs":
            time.sleep(LONG_S)
        if self.wanted == "close raises":
            raise ArithmeticError("it does not close")
