"""RL with LoRA from one end to the other: adapter, merge, RL on the merged base, merge, evaluation of both."""

import json
from pathlib import Path

from safetensors.torch import load_file

import vlarl
from vlarl.cli import main
from vlarl.export.merge import merge
from vlarl.policies.adapters import fingerprint
from vlarl.policies.tiny import init_tiny
from vlarl.run.session import RunSummary

NUM_STATES = 10
QUICK = {
    "run.num_threads": 1,
    "env.task_ids": [1, 4],
    "rollout.num_groups": 8,
    "rollout.group_size": 6,
    "lora.enabled": True,
    "lora.rank": 16,
    "optim.lr": 1e-3,
    "eval.states_per_task": NUM_STATES,
    "eval.videos": 0,
    "eval.interval": 0,
    "checkpoint.best_return": False,
    "logging.tensorboard": False,
    "logging.report": False,
}


def train(root: Path, name: str, **overrides: object) -> RunSummary:
    return vlarl.train(
        vlarl.load_config("tabletop_grpo", QUICK | {"run.root": str(root), "run.name": name} | overrides)
    )


def successes(checkpoint: Path) -> list[bool]:
    return [e.success for e in vlarl.evaluate(checkpoint, None, [1, 4], NUM_STATES, device="cpu").episodes]


def test_rl_on_a_merged_base_merged_again_acts_like_its_adapter(tmp_path):
    first = train(tmp_path, "first", **{"run.iterations": 1})
    base = merge(first.run_dir / "checkpoints" / "final", tmp_path / "base", dtype="float32")
    weights = fingerprint(base.out)
    second = train(tmp_path, "second", **{"run.iterations": 2, "policy.path": str(base.out)})
    adapter = second.run_dir / "checkpoints" / "final"
    assert second.success_after >= first.success_before + 0.3
    assert fingerprint(base.out) == weights, "training must leave its base alone"
    merged = merge(adapter, tmp_path / "merged", dtype="float32")
    assert merged.logit_error <= 1e-4
    by_adapter, by_merged = successes(adapter), successes(merged.out)
    assert by_adapter == by_merged
    assert sum(by_adapter) / len(by_adapter) == second.success_after


def test_a_run_writes_its_final_policy_merged_as_the_command_does(tmp_path):
    """Longer than before, it replaces what it had written."""
    few = {"rollout.num_groups": 2, "rollout.group_size": 2, "eval.states_per_task": 1, "checkpoint.merge": True}
    few |= {"policy.path": "builtin:tiny-oft", "reward.source": "dense"}
    run = train(tmp_path, "run", **few, **{"run.iterations": 1}).run_dir
    merged, first = run / "checkpoints" / "merged", load_file(run / "checkpoints" / "merged" / "model.safetensors")
    by_command = merge(run / "checkpoints" / "final", tmp_path / "by_command").out
    assert {path.name for path in merged.iterdir()} == {path.name for path in by_command.iterdir()}
    ours, theirs = first, load_file(by_command / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    assert not vlarl.load_policy(merged).has_adapter, "a whole checkpoint"
    assert json.loads((merged / "training_data.json").read_text())["trained_on"][-1]["by"] == "train"
    vlarl.train(resume=run, overrides={"run.iterations": 2})
    again = load_file(merged / "model.safetensors")
    assert any(not again[name].equal(first[name]) for name in first)


def test_a_resumed_run_with_adapters_equals_the_undisturbed_one(tmp_path):
    init_tiny("parallel", seed=1).save(tmp_path / "base")

    def flags(name: str, iterations: int) -> list[str]:
        return [
            "train",
            *("--policy.path", str(tmp_path / "base")),
            *("--run.root", str(tmp_path)),
            *("--run.name", name),
            *("--run.iterations", str(iterations)),
            *("--run.num_threads", "1"),
            *("--env.task_ids", "0", "3"),
            *("--env.num_envs", "4"),
            *("--rollout.num_groups", "4"),
            *("--rollout.group_size", "1"),
            *("--reward.source", "dense"),
            *("--algorithm.name", "ppo"),
            *("--algorithm.critic_hidden", "16"),
            *("--algorithm.epochs", "1"),
            *("--optim.minibatches", "2"),
            *("--eval.states_per_task", "1"),
            *("--eval.interval", "0"),
            *("--eval.videos", "0"),
            "--use-lora",
            "--policy.gradient_checkpointing",
            "--no-logging.tensorboard",
            "--no-logging.report",
        ]

    assert main(flags("whole", 3)) == 0
    assert main(flags("parts", 2)) == 0
    assert main(["train", "--resume", str(tmp_path / "parts"), "--run.iterations", "3"]) == 0
    whole, parts = (tmp_path / name / "checkpoints" / "final" for name in ("whole", "parts"))
    for file in ("adapter_model.safetensors", "value_head.safetensors", "trainer.safetensors"):
        ours, theirs = load_file(whole / file), load_file(parts / file)
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in ours), file
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["train/ratio_first_minibatch_error"] == 0.0
    assert not (whole / "model.safetensors").exists()
