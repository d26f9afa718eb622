"""A vision-language model learns on prompts from the reward, and from nothing else: the shipped base, a few iterations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import vlarl
from vlarl.policies.load import load_policy

QUICK: dict[str, Any] = {
    "run.num_threads": 1,
    "run.iterations": 12,  # half of the presets'; learning rate and batch are theirs
    "eval.states_per_task": 20,
    "eval.interval": 0,
    "checkpoint.interval": 0,
    "checkpoint.best_return": False,
    "logging.tensorboard": False,
    "logging.report": False,
}
PRESETS = ("prompts_grpo", "prompts_ppo")
SHORT = QUICK | {"rollout.num_groups": 4, "eval.states_per_task": 2}


def shuffled(completions, solution, **columns) -> list[float]:
    """The rewards of a rollout, each given to another text."""
    texts = [completion[0]["content"] for completion in completions]
    rights = [float(text == right) for text, right in zip(texts, solution, strict=True)]
    return np.random.default_rng(sum(map(len, texts))).permutation(rights).tolist()


def train(run: Path, preset: str, options: dict[str, Any]) -> tuple[float, float]:
    """Greedy success before and after."""
    named = {"run.root": str(run.parent), "run.name": run.name}
    summary = vlarl.train(vlarl.load_config(preset, options | named))
    assert summary.success_before is not None and summary.success_after is not None
    return summary.success_before, summary.success_after


def rows(run: Path) -> list[dict[str, Any]]:
    """Everything but times and speeds, which are never equal."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "rollout/collection_time", "rollout/env_steps_per_s")
    return [{k: v for k, v in row.items() if k not in timed and not k.startswith(("time/", "perf/"))} for row in lines]


@pytest.mark.parametrize("preset", PRESETS)
def test_exact_matches_rise_when_they_are_rewarded(tmp_path, preset):
    before, after = train(tmp_path / "run", preset, QUICK)
    assert before <= 0.1
    assert after >= before + 0.3


def test_exact_matches_do_not_rise_when_the_rewards_are_shuffled(tmp_path):
    options = QUICK | {"reward.source": f"{__name__}:shuffled"}
    before, after = train(tmp_path / "run", "prompts_grpo", options)
    assert after <= before + 0.1


def test_nothing_changes_when_the_learning_rate_is_zero(tmp_path):
    before, after = train(tmp_path / "run", "prompts_grpo", SHORT | {"optim.lr": 0.0, "run.iterations": 2})
    assert after == before
    base, trained = (load_policy(path) for path in ("builtin:tiny-qwen2.5-vl", tmp_path / "run"))
    assert all(a.equal(b) for a, b in zip(base.parameters(), trained.parameters(), strict=True))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resumed_run_equals_an_undisturbed_one(tmp_path, preset):
    train(tmp_path / "whole", preset, SHORT | {"run.iterations": 3})
    train(tmp_path / "parts", preset, SHORT | {"run.iterations": 2})
    vlarl.train(None, {"run.iterations": 3}, resume=str(tmp_path / "parts"))
    assert rows(tmp_path / "parts")[3] == rows(tmp_path / "whole")[3]
    whole, parts = (load_file(tmp_path / run / "checkpoints/final/model.safetensors") for run in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(whole[name].equal(parts[name]) for name in whole)
