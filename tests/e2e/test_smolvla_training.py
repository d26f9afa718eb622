"""SmolVLA through `vlarl train` on the tabletop: every ratio level, both critics, resumed, evaluated, merged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.smolvla import FOLDER
from safetensors.torch import load_file

from vlarl.cli import main
from vlarl.policies.load import load_policy


def flags(root: Path, name: str, *extra: str, iterations: int = 2) -> list[str]:
    """Dense reward: random weights never succeed, but they get nearer or farther, so returns differ within groups."""
    return [
        "train",
        *("--policy.path", str(FOLDER), "--policy.chunk_length", "4", "--policy.flow_steps", "3"),
        *("--run.root", str(root), "--run.name", name, "--run.iterations", str(iterations)),
        *("--run.num_threads", "1", "--run.device", "cpu"),
        *("--env.task_ids", "0", "--env.num_envs", "4", "--env.max_steps", "8"),
        *("--rollout.num_groups", "2", "--rollout.group_size", "2"),
        *("--reward.source", "dense"),
        *("--optim.lr", "1e-3", "--optim.warmup_iterations", "0", "--optim.minibatches", "2"),
        *("--optim.microbatch_size", "16", "--algorithm.epochs", "1"),
        *("--eval.states_per_task", "1", "--eval.interval", "0", "--eval.videos", "0"),
        *("--checkpoint.interval", "2"),
        "--no-logging.tensorboard",
        "--no-logging.report",
        *extra,
    ]


def rows(run: Path) -> list[dict[str, Any]]:
    """Iterations with an update."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/grad_norm" in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def moved(folder: Path) -> set[str]:
    """Names of the tensors that training changed, without the layers' own."""
    before, after = weights(FOLDER), weights(folder)
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--algorithm.ratio_level", "token"], id="grpo-token-sde"),
        pytest.param(["--algorithm.ratio_level", "action", "--policy.flow_noise", "cps"], id="grpo-action-cps"),
        pytest.param(["--algorithm.ratio_level", "chunk", "--policy.flow_noise", "noise"], id="grpo-chunk-noise"),
        pytest.param(["--algorithm.name", "ppo"], id="ppo-vlm"),
        pytest.param(["--algorithm.name", "ppo", "--policy.flow_critic", "expert"], id="ppo-expert"),
        pytest.param(["--policy.train_backbone", "--kl.coef", "0.1"], id="backbone-reference"),
    ],
)
def test_it_trains_and_the_first_ratio_is_one(tmp_path, options):
    assert main(flags(tmp_path, "run", *options)) == 0
    found = rows(tmp_path / "run")
    assert len(found) == 2
    for row in found:
        assert row["train/ratio_first_minibatch_error"] < 1e-4 and row["train/engine_logprob_error"] < 1e-4
        assert 0 < row["train/grad_norm"] < float("inf")
    changed = moved(tmp_path / "run" / "checkpoints" / "final")
    assert any("lm_expert" in name for name in changed) and "model.action_out_proj.weight" in changed
    assert any(".vlm.model." in name for name in changed) == ("--policy.train_backbone" in options)
    final = tmp_path / "run" / "checkpoints" / "final"
    assert (final / "value_head.safetensors").is_file() == ("ppo" in options)
    assert (final / "noise_head.safetensors").is_file() == ("noise" in options)


def test_a_constant_reward_moves_nothing(tmp_path):
    """No episode succeeds, so all returns are alike."""
    assert main(flags(tmp_path, "run", "--reward.source", "sparse")) == 0
    assert moved(tmp_path / "run" / "checkpoints" / "final") == set()


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    noise = ("--policy.flow_noise", "noise", "--algorithm.name", "ppo")
    assert main(flags(tmp_path, "whole", *noise, iterations=4)) == 0
    assert main(flags(tmp_path, "parts", *noise, iterations=2)) == 0
    assert main(["train", "--resume", str(tmp_path / "parts"), "--run.iterations", "4"]) == 0
    ours, theirs = (tmp_path / name / "checkpoints" / "final" for name in ("whole", "parts"))
    for file in ("model", "noise_head", "value_head"):
        one, two = load_file(ours / f"{file}.safetensors"), load_file(theirs / f"{file}.safetensors")
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_adapters_are_trained_evaluated_and_merged_into_a_folder_of_lerobots_layout(tmp_path, capsys):
    assert main(flags(tmp_path, "run", "--lora.enabled", "true", "--lora.rank", "2")) == 0
    final = tmp_path / "run" / "checkpoints" / "final"
    assert not (final / "model.safetensors").exists() and (final / "adapter_model.safetensors").is_file()
    options = ("--eval.states_per_task", "1", "--env.max_steps", "8", "--env.task_ids", "0", "--run.device", "cpu")
    assert main(["eval", str(final), *options]) == 0
    assert main(["merge", str(final), str(tmp_path / "merged")]) == 0
    assert "logits:" in capsys.readouterr().out
    changed = moved(tmp_path / "merged")
    assert changed and not any(".vlm.model." in name for name in changed)
    written = {path.name for path in FOLDER.iterdir() if path.suffix != ".npz"}
    assert written <= {path.name for path in (tmp_path / "merged").iterdir()}
    assert load_policy(tmp_path / "merged").num_steps == 4
