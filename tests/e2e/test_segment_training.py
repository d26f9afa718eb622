"""PPO on segments of a fixed length: repeatable, resumable to the bit, and counted by the episodes that ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from vlarl.cli import main

NUM_ENVS, NUM_STEPS = 4, 10  # episodes last up to 32 steps: most are cut, some several times


def flags(checkpoint: Path, root: Path, name: str, *extra: str) -> list[str]:
    return [
        *("train", "--algorithm.name", "ppo", "--algorithm.critic_hidden", "16", "--algorithm.epochs", "1"),
        *("--policy.path", str(checkpoint), "--run.root", str(root), "--run.name", name, "--run.iterations", "6"),
        *("--run.num_threads", "1", "--run.device", "cpu", "--env.task_ids", "0", "3"),
        *("--env.num_envs", str(NUM_ENVS), "--rollout.num_steps", str(NUM_STEPS), "--rollout.group_size", "1"),
        *("--reward.source", "shaped", "--optim.lr", "1e-3", "--optim.minibatches", "2"),
        *("--optim.warmup_iterations", "0", "--eval.states_per_task", "1", "--eval.interval", "4"),
        *("--eval.videos", "0", "--checkpoint.interval", "3", "--no-logging.tensorboard"),
        *extra,
    ]


def rows(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Everything but times and speeds, which are never equal."""
    lines = [json.loads(line) for line in (run / file).read_text().splitlines()]
    timed = ("time", "rollout/collection_time", "rollout/env_steps_per_s")
    return [{k: v for k, v in row.items() if k not in timed and not k.startswith(("time/", "perf/"))} for row in lines]


def counters(run: Path, checkpoint: str = "final") -> dict[str, Any]:
    return json.loads((run / "checkpoints" / checkpoint / "trainer.json").read_text())


def assert_same_run(one: Path, two: Path) -> None:
    assert rows(one) == rows(two)
    assert rows(one, "episodes.jsonl") == rows(two, "episodes.jsonl")
    assert counters(one) == counters(two)
    for file in ("model.safetensors", "trainer.safetensors"):
        ours, theirs = (load_file(run / "checkpoints" / "final" / file) for run in (one, two))
        assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six iterations that nothing disturbs."""
    root = tmp_path_factory.mktemp("whole")
    assert main(flags(checkpoint, root, "run")) == 0
    return root / "run"


def test_an_iteration_has_so_many_steps_and_episodes_are_reported_once_when_they_end(whole):
    metrics, episodes = rows(whole)[1:], [row for row in rows(whole, "episodes.jsonl") if row["phase"] == "rollout"]
    total = [row["rollout/total_env_steps"] for row in metrics]
    at_most = 16 * NUM_ENVS  # ten steps are two decisions of eight
    assert all(0 < now - before <= at_most for before, now in zip([0, *total], total, strict=False))
    by_iteration = [sum(e["iteration"] == i for e in episodes) for i in range(1, 7)]
    assert by_iteration == [row["rollout/num_trajectories"] for row in metrics] and sum(by_iteration) > 0
    assert by_iteration[0] == 0 and "rollout/success_rate" not in metrics[0] and metrics[0]["rollout/num_segments"] == 4
    assert len({e["episode_id"] for e in episodes}) == len(episodes)
    assert all(e["length"] == 32 or e["success"] for e in episodes), "whole episodes, over all their segments"
    assert all(row["train/ratio_first_minibatch_error"] < 1e-5 for row in metrics)
    left = counters(whole)["open_episodes"]["episodes"]
    assert counters(whole)["episodes"] == len(episodes)
    assert counters(whole)["env_steps"] == sum(e["length"] for e in episodes) + sum(
        e["earlier"]["num_steps"] for e in left
    ), "every step belongs to an episode that ended or that continues"
    assert (whole / "report.html").exists()


def test_a_run_killed_and_resumed_collects_the_same_segments(whole, checkpoint, tmp_path):
    """Killed after its fifth iteration, it resumes from the third: with the episodes that were under way then."""
    run = tmp_path / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vlarl.cli", *flags(checkpoint, tmp_path, "run", "--run.iterations", "600")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not ((run / "metrics.jsonl").is_file() and '"iteration": 5,' in (run / "metrics.jsonl").read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert {path.name for path in (run / "checkpoints").glob("step_*")} == {"step_000003"}
    assert len(counters(run, "step_000003")["open_episodes"]["episodes"]) > 0
    assert main(["train", "--resume", str(run), "--run.iterations", "6"]) == 0
    assert_same_run(run, whole)


def test_a_run_that_stops_and_is_resumed_for_longer_is_the_longer_run(whole, checkpoint, tmp_path):
    """Its evaluations differ: open episodes come back after one and after none."""
    assert main(flags(checkpoint, tmp_path, "run", "--run.iterations", "2", "--eval.interval", "0")) == 0
    assert main(["train", "--resume", str(tmp_path / "run"), "--run.iterations", "6", "--eval.interval", "4"]) == 0
    ours, theirs = rows(tmp_path / "run"), rows(whole)
    without = [{k: v for k, v in row.items() if not k.startswith("val/")} for row in ours[1:]]
    assert without == [{k: v for k, v in row.items() if not k.startswith("val/")} for row in theirs[1:]]


def test_other_environments_are_refused_when_a_run_is_resumed(whole, capsys):
    arguments = ["train", "--resume", str(whole), "--run.iterations", "7", "--env.num_envs", "5"]
    assert main(arguments) == 2
    assert "resume with --env.num_envs 4" in capsys.readouterr().err


def test_evaluations_and_checkpoints_may_be_counted_in_environment_steps(checkpoint, tmp_path):
    """At most 64 steps an iteration."""
    steps = ("--eval.interval_steps", "100", "--checkpoint.interval_steps", "90", "--checkpoint.keep", "9")
    given = flags(checkpoint, tmp_path, "run")
    for option in ("--eval.interval", "--checkpoint.interval"):
        del given[given.index(option) : given.index(option) + 2]
    assert main([*given, *steps]) == 0
    metrics = rows(tmp_path / "run")
    total = [row.get("rollout/total_env_steps", 0) for row in metrics]
    expected = [i for i in range(1, 7) if total[i] // 100 > total[i - 1] // 100 or i == 6]
    assert [row["iteration"] for row in metrics if "val/success_rate" in row] == [0, *expected]
    saved = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")}
    passed = [i for i in range(1, 6) if total[i] // 90 > total[i - 1] // 90]
    assert saved == {f"step_{i:06d}" for i in passed} and len(passed) > 1
