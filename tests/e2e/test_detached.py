"""A detached run, from its start over a stop and a resume to its end, followed from outside; and its timeline."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--run.name", "first", "--run.num_threads", "1", "--run.device", "cpu"),
    *("--env.task_ids", "0", "--env.num_envs", "2", "--rollout.num_groups", "1", "--rollout.group_size", "2"),
    *("--optim.minibatches", "1", "--reward.source", "dense", "--eval.states_per_task", "1", "--eval.videos", "0"),
    *("--eval.interval", "0", "--no-logging.tensorboard", "--no-logging.report", "--logging.trace"),
)


def vlarl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "vlarl.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def status(folder: Path) -> dict[str, Any]:
    done = vlarl(folder, "status", "first", "--json")
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def wait_for(folder: Path, state: str, iteration: int = 0) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while (facts := status(folder))["state"] != state or facts["iteration"] < iteration:
        assert time.monotonic() < deadline, facts
        time.sleep(0.1)
    return facts


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder to call from, in which something is called as the package is."""
    (tmp_path / "vlarl").mkdir()
    (tmp_path / "vlarl" / "__init__.py").write_text("raise ImportError('the wrong one')")
    yield tmp_path
    told = tmp_path / "runs" / "first" / "status.json"
    if told.exists() and status(tmp_path)["state"] == "running":
        os.kill(json.loads(told.read_text())["pid"], signal.SIGKILL)


def test_a_detached_run_is_started_watched_stopped_and_resumed(folder, checkpoint):
    run = folder / "runs" / "first"
    begun = vlarl(folder, "train", "--policy.path", str(checkpoint), *FLAGS, "--run.iterations", "500", "--detach")
    assert begun.returncode == 0, begun.stderr
    facts = wait_for(folder, "running", iteration=2)
    assert f"kill -INT {facts['pid']} " in begun.stdout and "runs/first/logs/output.log" in begun.stdout
    assert facts["left_s"] > 0 and facts["rollout_success"] is not None and facts["val_success"] is not None
    assert facts["logs"][0]["name"] == "output.log"

    os.kill(facts["pid"], signal.SIGINT)
    stopped = wait_for(folder, "interrupted", iteration=2)
    deadline = time.monotonic() + 120
    while b"interrupted and saved" not in (run / "logs" / "output.log").read_bytes():  # it saves first
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert stopped["resume"] == "vlarl train --resume runs/first"

    iterations = str(stopped["iteration"] + 2)
    resumed = vlarl(folder, "train", "--resume", "first", "--run.iterations", iterations, "--detach")
    assert resumed.returncode == 0, resumed.stderr
    finished = wait_for(folder, "finished")
    assert (finished["iteration"], finished["started"]) == (int(iterations), stopped["started"])
    rows = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(int(iterations) + 1))
    assert "interrupted and saved" in (run / "logs" / "output-1.log").read_text()

    deadline = time.monotonic() + 120
    while not (text := (run / "trace.json").read_text()).endswith(
        "\n]"
    ):  # the status comes before the last files close
        assert time.monotonic() < deadline
        time.sleep(0.1)
    spans = [event for event in json.loads(text) if event["ph"] == "X"]
    names = [span["name"] for span in spans]
    assert names[0] == "evaluation" and names[-1] == "evaluation"
    assert names.count("update") == int(iterations) and names.count("rollout") in (int(iterations), int(iterations) + 1)
    assert all(first["ts"] + first["dur"] <= then["ts"] for first, then in zip(spans[:-1], spans[1:], strict=True)), (
        "what the loop does one after the other"
    )


def test_what_the_process_refuses_is_shown_and_leaves_nothing(folder):
    (folder / "runs").mkdir()
    (folder / "odd").mkdir()
    (folder / "odd" / "config.json").write_text("{}")  # which only loading it tells
    before = sorted(folder.rglob("*"))
    refused = vlarl(folder, "train", "--policy.path", "odd", *FLAGS, "--detach")
    assert refused.returncode == 2
    assert "\nerror: the policy" in refused.stderr and "it is not an OpenVLA checkpoint's" in refused.stderr
    assert sorted(folder.rglob("*")) == before


def test_what_can_be_refused_at_once_starts_no_process(folder):
    refused = vlarl(folder, "train", "--policy.path", "nowhere/at/all", *FLAGS, "--detach")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: nowhere/at/all is not a checkpoint")
