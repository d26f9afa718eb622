"""A simulator that dies in the middle of a run changes nothing but a counter."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fakes.processes import MODULES, simulators

GYM = [
    *("--env.suite", "gym", "--gym.env", "fakes.gym_envs:Reach", "--gym.images", "pixels.front"),
    *("--gym.proprio", "state", "goal", "state", "goal", "--gym.actions", "0", "1"),
    *("--gym.instructions", "go to the right goal", "go to the left goal", "--gym.task_option", "task"),
    *("--env.max_steps", "60", "--policy.path", "builtin:tiny-oft"),
]
SIZES = [
    *("--run.iterations", "2", "--run.num_threads", "1", "--run.device", "cpu", "--env.num_envs", "2"),
    *("--rollout.num_groups", "4", "--rollout.group_size", "3", "--eval.states_per_task", "2", "--eval.videos", "0"),
    *("--algorithm.verifier_gamma", "0.95", "--env.lockstep", "--no-logging.tensorboard", "--no-logging.report"),
]


def start(root: Path, name: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "vlarl.cli", "train", *GYM, *SIZES, "--run.root", str(root), "--run.name", name]
    environment = {**os.environ, "PYTHONPATH": MODULES, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rows(folder: Path) -> list[dict]:
    """metrics.jsonl without what the clock says."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    timed = ("time", "perf/", "rollout/collection_time", "rollout/env_steps_per_s")
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines]


def test_killed_simulators_change_nothing_but_a_counter(tmp_path):
    calm, shaken = start(tmp_path, "calm"), start(tmp_path, "shaken")
    metrics = tmp_path / "shaken" / "metrics.jsonl"
    limit = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()) and shaken.poll() is None and time.monotonic() < limit:
        time.sleep(0.05)
    victims = simulators(shaken.pid)
    assert len(victims) == 2, "a process for each environment, alive in the middle of the run"
    blows = dict(zip(victims, (signal.SIGKILL, signal.SIGSEGV), strict=True))
    for pid, blow in blows.items():
        os.kill(pid, blow)
    for run in (calm, shaken):
        output, _ = run.communicate(timeout=180)
        assert run.returncode == 0, output
    plain, disturbed = rows(tmp_path / "calm"), rows(tmp_path / "shaken")
    num_retries = [row.pop("rollout/retried_episodes", 0) for row in disturbed]
    assert sum(num_retries) == 2 and all(row.pop("rollout/retried_episodes", 0) == 0 for row in plain)
    assert disturbed == plain
    log = (tmp_path / "shaken" / "logs" / "train.log").read_text()
    assert all(f"process {pid} was killed by {blow.name}" in log for pid, blow in blows.items())
    assert "it is run again" in log
    assert not [pid for pid in victims if Path(f"/proc/{pid}").exists()], "nothing is left running"
