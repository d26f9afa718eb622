"""Environments for processes, which do what a test requires: run, raise, die, hang, refuse, send nonsense."""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlarl.envs.base import StepOutcome, SuiteSpec, TaskSpec
from vlarl.envs.signals import truth
from vlarl.errors import UsageError
from vlarl.types import Observation

SPEC = SuiteSpec(
    "counting",
    tuple(TaskSpec(i, f"count to {i + 5}", 12) for i in range(4)),
    train_states=(0, 1, 2),
    eval_states=(3, 4),
    benchmark_states=(3, 4),
    action_dim=2,
    proprio_dim=3,
)


def nonsense(connection: int, kind: str) -> None:
    """Send something other than a reply through a worker's connection, and hang."""
    for part in _NONSENSE[kind]():
        os.write(connection, part)
        time.sleep(0.05)
    time.sleep(600)


def _dripping() -> Iterator[bytes]:
    yield _frame(bytes(1 << 20))[:8]
    while True:
        yield b"x"


def _frame(content: bytes) -> bytes:
    return len(content).to_bytes(8, "big") + content


_NONSENSE = {
    "half a length": lambda: [_frame(b"x")[:3]],
    "half a message": lambda: [_frame(pickle.dumps("a reply"))[:-4]],
    "dripping": _dripping,
    "no pickle": lambda: [_frame(b"what a simulator prints to the wrong file")],
    "no reply": lambda: [_frame(pickle.dumps(42))],
    "a length without end": lambda: [b"\xff" * 4096],
}


class CountingEnv:
    """Counts its steps; succeeds when the sum of its first actions reaches task_id + 5. Notes what it does in a file."""

    def __init__(self, trouble: dict[str, int], diary: str | None) -> None:
        self.trouble, self.diary = trouble, diary
        self.note("built")

    def note(self, text: str) -> None:
        if self.diary:
            with Path(self.diary).open("a") as file:
                file.write(f"{os.getpid()} {text}\n")

    def once(self, trouble: str) -> bool:
        """Whether this trouble is to happen now: at its step, and only in the first process that gets there."""
        if self.trouble.get(trouble) != self.steps:
            return False
        marker = Path(f"{self.diary}.{trouble}")
        if marker.exists() and "always" not in self.trouble:
            return False
        marker.touch()
        return True

    def reset(self, task) -> None:
        self.note(f"reset {task.task_id} {task.init_state}")
        self.task, self.steps, self.total = task, 0, 0.0
        self.rng = np.random.default_rng([task.task_id, task.init_state])
        if "child" in self.trouble:  # both hold the pipe open for as long as they live
            held = os.open(f"{self.diary}.pipe", os.O_WRONLY)
            subprocess.Popen(["sleep", "600"], pass_fds=(held,))
        if "refuse" in self.trouble:
            raise UsageError("the assets are missing: fetch them")

    def step(self, action) -> StepOutcome:
        self.steps += 1
        self.total += float(action[0])
        self.fail()
        success = self.total >= self.task.task_id + 5
        if self.once("success"):
            success = truth("no", "info['success']")
        reward = float("nan") if self.once("nan reward") else float(self.steps)
        return StepOutcome(reward, success, self.trouble.get("truncate") == self.steps, success)

    def fail(self) -> None:
        """Faults that end a step before it has a result."""
        if self.once("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.once("hang"):
            time.sleep(600)
        if self.once("hold the GIL"):
            ctypes.PyDLL(None).sleep(600)
        if self.once("sys.exit"):
            sys.exit(3)
        if self.once("say much"):
            raise ArithmeticError("x" * 50_000_000)
        for kind in _NONSENSE:
            if self.once(kind):
                nonsense(int(sys.argv[1]), kind)
        if self.once("raise"):
            raise ArithmeticError("the joints exploded")
        if self.once("exit"):
            print("a last word", flush=True)
            os._exit(3)

    def observe(self) -> Observation:
        self.note("observe")
        images = np.full((1, 4, 6, 3), self.steps, np.uint8)
        proprio = np.array([self.total, self.task.init_state, self.rng.random()], np.float32)
        if self.once("nan state"):
            proprio[1] = np.inf
        if "shape" in self.trouble:
            images = images[:, :2]
        return Observation(images, proprio, SPEC.tasks[self.task.task_id].instruction)

    def frame(self) -> np.ndarray:
        size = self.trouble.get("large", 8)
        return np.full((size, size, 3), 100 + self.steps, np.uint8)

    def close(self) -> None:
        self.note("closed")


class CountingExpert:
    """Adds one at each step."""

    def __init__(self, env: CountingEnv) -> None:
        self.env = env

    def reset(self) -> None:
        pass

    def act(self) -> np.ndarray:
        return np.array([1.0, self.env.task.init_state], np.float32)


@dataclass(frozen=True)
class CountingFactory:
    trouble: tuple[tuple[str, int], ...] = ()
    diary: str | None = None
    spec: SuiteSpec = SPEC
    image_shape: tuple[int, int, int, int] = (1, 4, 6, 3)

    def variables(self, slot: int) -> dict[str, str]:
        return {"COUNTING_SLOT": str(slot)}

    def build(self) -> CountingEnv:
        return CountingEnv(dict(self.trouble), self.diary)

    def build_expert(self, env: CountingEnv) -> CountingExpert:
        return CountingExpert(env)
