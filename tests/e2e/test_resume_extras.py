"""Runs with everything that a checkpoint can hold besides the policy: resumed, they equal the undisturbed ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from vlarl.cli import main
from vlarl.policies.load import load_policy

PPO = (
    *("--algorithm.name", "ppo"),
    *("--algorithm.critic_hidden", "16"),
    *("--algorithm.gae_level", "step"),
    *("--algorithm.value_init_steps", "1"),
    *("--critic.kind", "separate"),
    *("--critic.lr", "1e-3"),
    *("--ema.beta", "0.9"),
    "--eval.use_ema",
    *("--kl.coef", "0.05"),
    *("--kl.target", "0.01"),
    *("--kl.horizon", "20"),
    *("--ptx.path", "experts"),
    *("--ptx.episodes_per_task", "1"),
    *("--ptx.batch_size", "7"),
)


def flags(checkpoint: Path, root: Path, name: str, iterations: int, *extra: str) -> list[str]:
    return [
        "train",
        *("--policy.path", str(checkpoint)),
        *("--run.root", str(root)),
        *("--run.name", name),
        *("--run.iterations", str(iterations)),
        *("--run.num_threads", "1"),
        *("--run.device", "cpu"),
        *("--env.task_ids", "0", "3"),
        *("--env.num_envs", "4"),
        *("--rollout.num_groups", "2"),
        *("--rollout.group_size", "2"),
        *("--reward.source", "dense"),
        *("--optim.lr", "1e-3"),
        *("--optim.warmup_iterations", "0"),
        *("--optim.minibatches", "2"),
        *("--algorithm.epochs", "1"),
        *("--eval.states_per_task", "1"),
        *("--eval.interval", "0"),
        *("--eval.videos", "0"),
        "--no-logging.tensorboard",
        "--no-logging.report",
        *extra,
    ]


def rows(run: Path) -> list[dict[str, Any]]:
    """Everything but times and speeds, which are never equal."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "rollout/collection_time", "rollout/env_steps_per_s")
    return [{k: v for k, v in row.items() if k not in timed and not k.startswith(("time/", "perf/"))} for row in lines]


def assert_same_checkpoints(one: Path, two: Path) -> None:
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(two) for path in two.rglob("*.safetensors"))
    for file in files:
        ours, theirs = load_file(one / file), load_file(two / file)
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in ours), file
    assert json.loads((one / "trainer.json").read_text()) == json.loads((two / "trainer.json").read_text())


@pytest.mark.parametrize("lora", [(), ("--use-lora", "--lora-rank", "4")], ids=["full", "lora"])
def test_critic_average_and_kl_coefficient_resume(checkpoint, tmp_path, lora):
    assert main(flags(checkpoint, tmp_path, "whole", 3, *PPO, *lora)) == 0
    assert main(flags(checkpoint, tmp_path, "parts", 2, *PPO, *lora)) == 0
    assert main(["train", "--resume", str(tmp_path / "parts"), "--run.iterations", "3"]) == 0
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert parts[3] == whole[3]
    final = tmp_path / "whole" / "checkpoints" / "final"
    assert_same_checkpoints(final, tmp_path / "parts" / "checkpoints" / "final")
    assert (final / "critic" / "trained.safetensors").is_file() and not (final / "value_head.safetensors").exists()
    assert whole[1]["train/lr"] == 0.0 and whole[2]["train/lr"] == 1e-3
    assert whole[1]["train/kl_ref"] < 1e-9 < whole[3]["train/kl_ref"], (
        "measured from the start, not from the checkpoint"
    )
    assert whole[1]["train/kl_coef"] == 0.05 != whole[3]["train/kl_coef"]
    assert whole[2]["train/critic_grad_norm"] > 0
    assert "train/ptx_loss" not in whole[1] and whole[2]["train/ptx_loss"] != whole[3]["train/ptx_loss"]
    assert json.loads((final / "trainer.json").read_text())["ptx_position"] == 2 * 2 * 7, "of two updates"
    averages, newest = (load_policy(final.parent / name) for name in ("ema", "final"))
    pairs = [(a, b) for a, b in zip(averages.parameters(), newest.parameters(), strict=True) if not a.equal(b)]
    assert pairs, "the average lags behind"


def test_rollouts_are_gathered_and_collected_again_after_a_stop(checkpoint, tmp_path, monkeypatch):
    """One update for two rollouts, the last of five rollouts alone; a stop in the middle costs a rollout and no more."""
    gather = ("--optim.rollouts_per_update", "2", "--checkpoint.interval", "1", "--ema.beta", "0.9")
    assert main(flags(checkpoint, tmp_path, "whole", 5, *gather)) == 0
    whole = rows(tmp_path / "whole")
    waiting = [row.get("train/waiting_trajectories") for row in whole]
    assert waiting == [None, 4, None, 4, None, None]
    assert [row.get("train/kept_trajectories") for row in whole] == [None, None, 8, None, 8, 4]
    assert [row.get("train/optimizer_steps") for row in whole] == [None, None, 2, None, 2, 2]
    folders = {path.name for path in (tmp_path / "whole" / "checkpoints").iterdir()}
    assert folders == {"best_return", "ema", "final", "step_000002", "step_000004"}, "none with rollouts outstanding"

    from vlarl.interrupt import Interrupted
    from vlarl.rollout.collector import Collector

    episodes, calls = Collector.episodes, []

    def interrupted(self, tasks, sampling, *rest, **named):
        if sampling.temperature > 0:
            calls.append(1)
            if len(calls) == 4:  # the third rollout is gathered, and its update waits for this one
                raise Interrupted
        return episodes(self, tasks, sampling, *rest, **named)

    monkeypatch.setattr(Collector, "episodes", interrupted)
    assert main(flags(checkpoint, tmp_path, "parts", 5, *gather)) == 130
    monkeypatch.setattr(Collector, "episodes", episodes)
    assert json.loads((tmp_path / "parts" / "status.json").read_text())["iteration"] == 3
    counters = json.loads((tmp_path / "parts" / "checkpoints" / "step_000002" / "trainer.json").read_text())
    assert counters["iteration"] == 2 and counters["episodes"] == 8
    assert main(["train", "--resume", str(tmp_path / "parts")]) == 0
    assert rows(tmp_path / "parts") == whole
    assert_same_checkpoints(*(tmp_path / name / "checkpoints" / "final" for name in ("whole", "parts")))
