"""Whole runs of `vlarl train` at the smallest size: repeatable, resumable, interruptible, and still without learning."""

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

ITERATIONS = 4


def flags(checkpoint: Path, root: Path, name: str, *extra: str) -> list[str]:
    """Dense reward: a fresh policy never succeeds, but it gets nearer or farther, so returns differ within groups."""
    return [
        "train",
        *("--policy.path", str(checkpoint)),
        *("--run.root", str(root)),
        *("--run.name", name),
        *("--run.iterations", str(ITERATIONS)),
        *("--run.num_threads", "1"),
        *("--run.device", "cpu"),
        *("--env.task_ids", "0", "3"),
        *("--env.num_envs", "8"),
        *("--rollout.num_groups", "2"),
        *("--rollout.group_size", "2"),
        *("--reward.source", "dense"),
        *("--optim.lr", "1e-3"),
        *("--optim.warmup_iterations", "0"),
        *("--optim.minibatches", "2"),
        *("--optim.microbatch_size", "16"),
        *("--algorithm.epochs", "1"),
        *("--eval.states_per_task", "1"),
        *("--eval.interval", "2"),
        *("--eval.videos", "0"),
        *("--checkpoint.interval", "2"),
        "--no-logging.tensorboard",
        "--no-logging.report",
        *extra,
    ]


def rows(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Everything but times and speeds, which are never equal."""
    lines = [json.loads(line) for line in (run / file).read_text().splitlines()]
    timed = ("time", "rollout/collection_time", "rollout/env_steps_per_s")
    return [{k: v for k, v in row.items() if k not in timed and not k.startswith(("time/", "perf/"))} for row in lines]


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())


def assert_same_weights(one: Path, two: Path) -> None:
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert files == sorted(path.name for path in two.glob("*.safetensors"))
    for file in files:
        ours, theirs = load_file(one / file), load_file(two / file)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].equal(theirs[name]), (file, name)


def start(arguments: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "vlarl.cli", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_row(process: subprocess.Popen[str], run: Path, iteration: int) -> None:
    """Until metrics.jsonl shows the iteration; the process must still be running then."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").is_file() and f'"iteration": {iteration},' in (run / "metrics.jsonl").read_text():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    raise AssertionError(f"no row {iteration} in time")


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four iterations that nothing disturbs."""
    root = tmp_path_factory.mktemp("whole")
    assert main(flags(checkpoint, root, "run")) == 0
    return root / "run"


def test_a_run_leaves_what_it_promises(whole):
    metrics = rows(whole)
    assert [row["iteration"] for row in metrics] == [0, 1, 2, 3, 4]
    assert [("val/success_rate" in row) for row in metrics] == [True, False, True, False, True]
    assert "train/policy_loss" not in metrics[0]
    for row in metrics[1:]:
        assert row["rollout/num_trajectories"] == 4 and row["rollout/num_crashed"] == 0
        assert row["train/kept_trajectories"] == 4, "dense rewards must differ in every group"
        assert row["train/ratio_first_minibatch_error"] < 1e-5
        assert row["train/optimizer_steps"] == 2 and row["train/skipped_steps"] == 0
        assert row["train/grad_norm"] > 0 and row["train/lr"] == 1e-3
    episodes = rows(whole, "episodes.jsonl")
    assert [sum(e["phase"] == phase for e in episodes) for phase in ("eval", "rollout")] == [2 * 3, 4 * 4]
    assert len({e["episode_id"] for e in episodes if e["phase"] == "rollout"}) == 16
    assert {(e["iteration"], e["policy_version"]) for e in episodes if e["phase"] == "rollout"} == {
        (n, n - 1) for n in range(1, 5)
    }
    assert status(whole)["state"] == "finished" and status(whole)["iteration"] == 4
    assert {p.name for p in (whole / "checkpoints").iterdir()} == {"best_return", "final", "step_000002"}
    counters = json.loads((whole / "checkpoints" / "final" / "trainer.json").read_text())
    assert (counters["iteration"], counters["episodes"], counters["optimizer_steps"]) == (4, 16, 8)
    assert counters["env_steps"] == sum(e["length"] for e in episodes if e["phase"] == "rollout")
    best = json.loads((whole / "checkpoints" / "best_return" / "metadata.json").read_text())
    assert {
        "timestamp",
        "ema_return",
        "current_return",
        "training_step",
        "policy_updates",
        "global_step",
        "run_id",
        "model_path",
    } == set(best)
    assert best["run_id"] == "run"


def test_training_changes_the_weights(whole, checkpoint):
    before, after = (load_file(p / "model.safetensors") for p in (checkpoint, whole / "checkpoints" / "final"))
    assert any(not before[name].equal(after[name]) for name in before)


def test_one_seed_one_result_and_another_seed_another(whole, checkpoint, tmp_path):
    assert main(flags(checkpoint, tmp_path, "again")) == 0
    assert rows(tmp_path / "again") == rows(whole)
    assert rows(tmp_path / "again", "episodes.jsonl") == rows(whole, "episodes.jsonl")
    assert_same_weights(tmp_path / "again" / "checkpoints" / "final", whole / "checkpoints" / "final")
    assert main(flags(checkpoint, tmp_path, "other", "--run.seed", "1", "--run.iterations", "1")) == 0
    assert rows(tmp_path / "other")[1] != rows(whole)[1]


def test_a_run_killed_and_resumed_equals_the_undisturbed_one(whole, checkpoint, tmp_path):
    run = tmp_path / "run"
    process = start(flags(checkpoint, tmp_path, "run"))
    wait_for_row(process, run, 3)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert status(run)["state"] == "running" and not (run / "checkpoints" / "final").exists()
    assert main(["train", "--resume", str(run)]) == 0
    assert rows(run) == rows(whole)
    assert rows(run, "episodes.jsonl") == rows(whole, "episodes.jsonl")
    assert_same_weights(run / "checkpoints" / "final", whole / "checkpoints" / "final")
    assert status(run)["state"] == "finished"


@pytest.mark.parametrize(
    ("number", "seen"),
    [(signal.SIGINT, 0), (signal.SIGINT, 1), (signal.SIGTERM, 1)],
    ids=["at the start", "Ctrl-C", "SIGTERM"],
)
def test_a_stop_saves_and_the_resumed_run_equals_the_undisturbed_one(whole, checkpoint, tmp_path, number, seen):
    """By Ctrl-C or by SIGTERM, as a scheduler stops jobs. Also before the first update: then the first
    evaluation is made again, not twice."""
    run = tmp_path / "run"
    process = start(flags(checkpoint, tmp_path, "run"))
    wait_for_row(process, run, seen)
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "--resume" in output
    stopped = status(run)
    assert stopped["state"] == "interrupted" and seen <= stopped["iteration"] < 4
    assert (run / "checkpoints" / f"step_{stopped['iteration']:06d}" / "trainer.json").is_file()
    assert main(["train", "--resume", str(run)]) == 0
    assert rows(run) == rows(whole)
    assert rows(run, "episodes.jsonl") == rows(whole, "episodes.jsonl")
    assert_same_weights(run / "checkpoints" / "final", whole / "checkpoints" / "final")


def test_ppo_resumes_with_its_critic(checkpoint, tmp_path):
    """The whole run against one that stops after two iterations and is resumed for more."""
    ppo = (
        *("--algorithm.name", "ppo"),
        *("--algorithm.critic_hidden", "16"),
        *("--rollout.num_groups", "4"),
        *("--rollout.group_size", "1"),
        *("--algorithm.value_init_steps", "1"),
        *("--eval.interval", "0"),
    )
    assert main(flags(checkpoint, tmp_path, "whole", *ppo, "--run.iterations", "3")) == 0
    assert main(flags(checkpoint, tmp_path, "parts", *ppo, "--run.iterations", "2")) == 0
    assert main(["train", "--resume", str(tmp_path / "parts"), "--run.iterations", "3"]) == 0
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert parts[3] == whole[3]
    assert whole[1]["train/lr"] == 0.0 and whole[2]["train/lr"] == 1e-3
    assert_same_weights(*(tmp_path / name / "checkpoints" / "final" for name in ("whole", "parts")))


def test_without_learning_nothing_changes(checkpoint, tmp_path):
    arguments = flags(checkpoint, tmp_path, "still", "--optim.lr", "0", "--run.iterations", "2", "--eval.interval", "1")
    assert main(arguments) == 0
    metrics = rows(tmp_path / "still")
    first = {name: value for name, value in metrics[0].items() if name.startswith("val/")}
    assert first
    for row in metrics[1:]:
        assert {name: value for name, value in row.items() if name.startswith("val/")} == first
        assert row["train/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    final = load_file(tmp_path / "still" / "checkpoints" / "final" / "model.safetensors")
    before = load_file(checkpoint / "model.safetensors")
    assert all(final[name].equal(before[name]) for name in before)


def test_an_environment_step_budget_ends_the_run_with_an_evaluation(checkpoint, tmp_path):
    assert main(flags(checkpoint, tmp_path, "short", "--run.total_env_steps", "10", "--eval.interval", "0")) == 0
    metrics = rows(tmp_path / "short")
    assert [row["iteration"] for row in metrics] == [0, 1] and "val/success_rate" in metrics[1]
    assert status(tmp_path / "short")["state"] == "finished"
