"""A tiny SmolVLA from fresh weights: some steps of imitation, then an iteration of GRPO from the result."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vlarl.cli import main
from vlarl.policies.load import load_policy


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logged(run: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def test_a_base_is_made_and_improved(tmp_path):
    common = ["--run.root", str(tmp_path), "--run.num_threads", "1", "--run.device", "cpu"]
    imitation = [
        *("finetune", "tabletop_base_smolvla", "--run.name", "base", *common),
        *("--demos.suites", "tabletop_spatial", "--demos.task_ids", "0", "--demos.episodes_per_task", "2"),
        *("--demos.num_workers", "1", "--optim.steps", "4", "--optim.batch_size", "8"),
        *("--optim.warmup_steps", "1", "--optim.log_interval", "2"),
    ]
    assert main(imitation) == 0
    base = tmp_path / "base" / "checkpoints" / "final"
    improved = [
        *("train", "--policy.path", "base", "--run.name", "run", *common, "--run.iterations", "1"),
        *("--env.suite", "tabletop_spatial", "--env.task_ids", "0", "--env.num_envs", "4", "--env.max_steps", "8"),
        *("--rollout.num_groups", "2", "--rollout.group_size", "2", "--reward.source", "dense"),
        *("--optim.lr", "1e-3", "--optim.warmup_iterations", "0", "--optim.minibatches", "2"),
        *("--optim.microbatch_size", "16", "--algorithm.name", "grpo", "--algorithm.epochs", "1"),
        *("--eval.states_per_task", "1", "--eval.interval", "0", "--eval.videos", "0"),
        *("--no-logging.tensorboard", "--no-logging.report"),
    ]
    assert main(improved) == 0
    run = tmp_path / "run"
    final = run / "checkpoints" / "final"
    for key in ("train/ratio_first_minibatch_error", "train/engine_logprob_error"):
        (error,) = logged(run, key)
        assert error < 1e-4, key
    assert 0 < logged(run, "train/grad_norm")[0] < float("inf")

    before, after = (load_file(folder / "model.safetensors") for folder in (base, final))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and "model.action_out_proj.weight" in changed
    assert not any(".vlm.model." in name for name in changed), "by default RL leaves the backbone as imitation left it"
    ours, theirs = (load_policy(folder).processor.scalings for folder in (base, final))
    assert torch.equal(ours.action.stats["std"], theirs.action.stats["std"]), "RL keeps the demonstrations' statistics"
    assert (ours.action.stats["std"][:6] < 0.9).all()
