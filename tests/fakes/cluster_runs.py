"""Runs on a cluster, looked at from outside: their rows, their workers, and what they leave running."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from uuid import uuid4

import torch
from fakes.float_error import LOGPROB_FACTOR, FloatJudge, logprob_judge
from fakes.processes import MODULES

from vlarl.decisions import Sampling
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.policies.load import load_policy
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.types import Task

MAXIMA = ("train/ratio_max", "train/ratio_first_minibatch_error")
MARK = "VLARL_TEST_RUN"  # an environment variable that all processes of a run inherit

SMALL = {
    "run.iterations": 3,
    "run.num_threads": 1,
    "run.device": "cpu",
    "policy.path": "builtin:tiny-oft",  # decides on whole chunks: a third of the time of one token after the other
    "env.task_ids": (0, 3),
    "env.num_envs": 12,
    "env.lockstep": True,  # the same batches as in one process
    "rollout.num_groups": 4,
    "rollout.group_size": 4,
    "rollout.temperature": 0.6,
    "optim.lr": 1e-5,
    "eval.states_per_task": 1,
    "eval.videos": 0,
    "eval.interval": 0,
    "checkpoint.interval": 1,
    "logging.tensorboard": False,
    "logging.report": False,
}


def rows(folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what the clock says, and without syncs, which only a cluster has."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    timed = ("time", "perf/", "sync/", "rollout/collection_time", "rollout/env_steps_per_s")
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines]


@cache
def rounding(policy_path: str, temperature: float) -> FloatJudge:
    """Float32's own errors in the log-probs of a built-in policy, where the tabletop's episodes begin."""
    policy = load_policy(policy_path)
    pool = TabletopPool("tabletop_spatial", 16, policy.image_size, ("agent", "wrist"))
    inputs = policy.process(pool.reset(range(16), [Task("tabletop_spatial", i % 10, i // 10, i) for i in range(16)]))
    tokens = TorchEngine(policy, torch.device("cpu")).generate(inputs, Sampling(temperature), range(16))
    return logprob_judge(policy, inputs, tokens.sample.ids, temperature)


def assert_equal_rows(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    """The same metrics, of runs that SMALL is the most part of.

    Averages over tokens may differ by LOGPROB_FACTOR times what float32 costs a log-prob in the root mean square, once
    for every update so far, and of their size where it is larger than 1. Maxima over tokens are accidents: they may
    differ by what two passes may, at worst.
    """
    judge = rounding(str(SMALL["policy.path"]), float(str(SMALL["rollout.temperature"])))
    worst, most = "train/engine_logprob_error", judge.apart(LOGPROB_FACTOR)
    assert all(row.get(worst, 0.0) <= most for row in [*ours, *theirs])
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert set(one) == set(other)
        average = LOGPROB_FACTOR * judge.rms * max(1.0, one["iteration"])
        allowed = {name: most if name in MAXIMA else average for name in one.keys() - {worst}}
        far = {k: (one[k], other[k]) for k in allowed if abs(one[k] - other[k]) > allowed[k] * max(1.0, abs(one[k]))}
        assert not far, f"iteration {one['iteration']}, allowed {average:.1e}, maxima {most:.1e}"


class ClusterRun:
    """`vlarl train … --distributed.backend ray` as a process of its own."""

    def __init__(self, root: Path, name: str, *arguments: str, variables: dict[str, str] | None = None) -> None:
        self.folder = root / name
        self.mark = uuid4().hex
        named = ["--run.root", str(root)] if "--resume" in arguments else ["--run.root", str(root), "--run.name", name]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vlarl.cli", "train", *arguments, *named, "--distributed.backend", "ray"],
            env={**os.environ, "PYTHONPATH": MODULES, "OMP_NUM_THREADS": "1", MARK: self.mark, **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pid_of(self, worker: str) -> int:
        """Where a worker runs now."""
        return int(json.loads((self.folder / "logs" / "workers.json").read_text())[worker]["pid"])

    def num_rows(self) -> int:
        """Rows of metrics.jsonl so far."""
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def wait_rows(self, count: int, limit_s: float = 240) -> None:
        """Wait until so many iterations are done."""
        wait_for(lambda: self.num_rows() >= count or self.process.poll() is not None, limit_s)
        if self.process.poll() is not None and self.num_rows() < count:
            raise AssertionError(f"the run ended with {self.process.returncode}:\n{self.process.communicate()[0]}")

    def end(self, limit_s: float = 240) -> tuple[int, str]:
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=limit_s)
        return self.process.returncode, output

    def left_running(self, limit_s: float = 90) -> list[str]:
        """Command lines of processes that the run has left behind, so long after it ended."""
        wait_for(lambda: not self._alive(), limit_s, must=False)
        return self._alive()

    def _alive(self) -> list[str]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (place / "environ").read_bytes():
                    found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120])
            except OSError:  # it has just ended, or is somebody else's
                continue
        return [line for line in found if line.strip()]  # a zombie has no command line


def wait_for(condition: Callable[[], bool], limit_s: float, must: bool = True) -> None:
    """Wait until it is so."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            assert not must, f"not so within {limit_s} s"
            return
        time.sleep(0.1)


def flags(options: dict[str, object]) -> list[str]:
    """Options as a command line has them."""
    written = []
    for path, value in options.items():
        if isinstance(value, bool):
            written.append(f"--{path}" if value else f"--no-{path}")
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            written += [f"--{path}", *map(str, values)]
    return written
