"""Whole runs with every kind of reward, and with rewards that fail."""

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.reward_models import save_classifier, save_clip
from fakes.reward_service import RewardService

from vlarl.cli import main
from vlarl.types import Trajectory


def fraction(trajectory: Trajectory) -> float:
    """A value in [0, 1) that depends only on the id of the episode."""
    return zlib.crc32(trajectory.task.episode_id.encode()) / 2**32


def fails_rarely(trajectory: Trajectory) -> float:
    if fraction(trajectory) < 0.05:
        raise ArithmeticError(f"no reward for {trajectory.task.episode_id}")
    return fraction(trajectory)


def fails_often(trajectory: Trajectory) -> float:
    if fraction(trajectory) < 0.6:
        raise ArithmeticError(f"no reward for {trajectory.task.episode_id}")
    return fraction(trajectory)


def is_late(trajectory: Trajectory) -> float:
    return trajectory.length + fraction(trajectory)


def flags(checkpoint: Path, root: Path, *extra: str) -> list[str]:
    return [
        "train",
        *("--policy.path", str(checkpoint)),
        *("--run.root", str(root)),
        *("--run.name", "run"),
        *("--run.iterations", "1"),
        *("--run.num_threads", "1"),
        *("--run.device", "cpu"),
        *("--env.task_ids", "0", "3"),
        *("--env.num_envs", "40"),
        *("--rollout.num_groups", "2"),
        *("--rollout.group_size", "4"),
        *("--algorithm.epochs", "1"),
        *("--eval.states_per_task", "1"),
        *("--eval.videos", "0"),
        *("--checkpoint.interval", "0"),
        "--no-logging.tensorboard",
        "--no-logging.report",
        *extra,
    ]


def read(run: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / file).read_text().splitlines()]


def trained(run: Path) -> dict[str, Any]:
    """The last row of a run that ended; every number in it is finite."""
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    row = read(run, "metrics.jsonl")[-1]
    assert all(math.isfinite(value) for value in row.values() if isinstance(value, int | float))
    return row


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardService]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = RewardService()
    yield running
    running.stop()


PPO = ("--algorithm.name", "ppo", "--algorithm.critic_hidden", "16")


@pytest.mark.parametrize(
    "options",
    [
        ("dense",),
        ("shaped", *PPO),
        ("rules", "--reward.idle_penalty", "0.1", "--reward.length_penalty", "0.01", *PPO),
        (f"{__name__}:is_late",),
        ("model", "--reward.model", "CLASSIFIER"),
        ("model", "--reward.model", "CLIP", "--reward.scoring", "steps", *PPO),
        ("remote", "--reward.url", "URL", "--reward.images", "last", "--reward.batch_size", "3", *PPO),
        ("combined", "--reward.sources", "sparse", "dense", "--reward.recipe", "tabletop_spatial/3 -> dense=2"),
    ],
    ids=lambda options: options[0] if options[0] != "model" else f"model {options[2]}",
)
def test_every_reward_trains(checkpoint, tmp_path, service, options):
    places = {"URL": service.url}
    if "CLASSIFIER" in options:
        places["CLASSIFIER"] = str(save_classifier(tmp_path / "model"))
    if "CLIP" in options:
        places["CLIP"] = str(save_clip(tmp_path / "model"))
    assert main(flags(checkpoint, tmp_path, "--reward.source", *(places.get(o, o) for o in options))) == 0
    row = trained(tmp_path / "run")
    assert row["rollout/reward_failures"] == 0 and row["rollout/num_trajectories"] == 8
    assert row["train/optimizer_steps"] > 0
    if options[0] == "remote":
        # Both evaluations are of two episodes.
        assert [len(request["episodes"]) for request in service.requests] == [2, 3, 3, 2, 2]
        assert row["rollout/mean_return"] == row["rollout/mean_length"]


@pytest.mark.parametrize("fallback", ["drop", "zero"])
def test_a_reward_that_fails_on_a_few_episodes_is_counted_and_training_continues(
    checkpoint, tmp_path, capsys, fallback
):
    options = (
        *("--reward.source", f"{__name__}:fails_rarely"),
        *("--reward.fallback", fallback),
        *("--rollout.num_groups", "10"),
        *("--run.iterations", "2"),
    )
    assert main(flags(checkpoint, tmp_path, *options)) == 0
    run = tmp_path / "run"
    trained(run)
    episodes = [episode for episode in read(run, "episodes.jsonl") if episode["phase"] == "rollout"]
    broken = [e for e in episodes if zlib.crc32(e["episode_id"].encode()) / 2**32 < 0.05]
    assert len(episodes) == 80 and 1 <= len(broken) <= 9
    rows = read(run, "metrics.jsonl")[1:]
    assert sum(row["rollout/reward_failures"] for row in rows) == len(broken)
    assert [row["rollout/reward_failure_rate"] for row in rows] == [row["rollout/reward_failures"] / 40 for row in rows]
    assert all(math.isfinite(row["train/policy_loss"]) and row["train/optimizer_steps"] > 0 for row in rows)
    shown = capsys.readouterr().out
    for row in rows:
        told = f"iteration {row['iteration']}: the reward failed on {row['rollout/reward_failures']:.0f} of 40 episodes"
        assert (told in shown) is (row["rollout/reward_failures"] > 0)
    log = (run / "logs" / "train.log").read_text()
    for episode in broken:
        assert f"the reward of episode {episode['episode_id']} failed\nTraceback (most recent call last):\n" in log
        assert f"ArithmeticError: no reward for {episode['episode_id']}" in log
    if fallback == "drop":
        assert {e["episode_id"] for e in episodes if e["status"] == "reward_failed"} == {
            e["episode_id"] for e in broken
        }
        assert sum(row["rollout/num_trajectories"] for row in rows) == 80 - len(broken)
    else:
        assert all(e["status"] == "ok" for e in episodes) and all(e["return"] == 0 for e in broken)
        assert sum(row["rollout/num_trajectories"] for row in rows) == 80


def test_a_reward_that_fails_on_most_episodes_ends_the_run_with_the_cause(checkpoint, tmp_path, capsys):
    options = ("--reward.source", f"{__name__}:fails_often", "--rollout.num_groups", "10")
    assert main(flags(checkpoint, tmp_path, *options)) == 1
    run = tmp_path / "run"
    message = capsys.readouterr().err
    assert "iteration 1: the reward failed on 21 of 40 episodes, more than reward.max_failure_rate = 0.5" in message
    assert "ArithmeticError: no reward for tabletop_spatial-t0" in message
    assert f"vlarl train --resume {run}" in message
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed" and "ArithmeticError" in status["message"]


def test_a_service_that_is_down_ends_the_run_with_its_address(checkpoint, tmp_path, capsys, service):
    service.stop()
    options = ("--reward.source", "remote", "--reward.url", service.url, "--reward.retries", "0")
    assert main(flags(checkpoint, tmp_path, *options)) == 1
    message = capsys.readouterr().err
    assert service.url in message and "did not reply in 1 attempts" in message


def test_a_model_that_can_not_be_loaded_is_refused_before_anything_starts(checkpoint, tmp_path, capsys):
    options = ("--reward.source", "model", "--reward.model", str(tmp_path / "nowhere"))
    assert main(flags(checkpoint, tmp_path, *options)) == 2
    assert "reward.model" in capsys.readouterr().err and not (tmp_path / "run").exists()
