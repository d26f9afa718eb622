"""The loop learns from the reward, and from nothing else: the shipped base model, a few iterations, two tasks."""

import json
import zlib

import pytest

import vlarl
from vlarl.types import Trajectory

QUICK = {
    "run.iterations": 3,
    "env.task_ids": [1, 4],
    "rollout.num_groups": 8,
    "rollout.group_size": 6,
    "eval.videos": 0,
    "eval.interval": 0,
    "checkpoint.interval": 0,
    "checkpoint.best_return": False,
    "logging.tensorboard": False,
    "logging.report": False,
}


def a_coin(trajectory: Trajectory) -> float:
    """A reward that knows nothing of success."""
    return float(zlib.crc32(trajectory.task.episode_id.encode()) % 2)


def train(tmp_path, **overrides) -> tuple[float, float]:
    options = QUICK | {"run.root": str(tmp_path), "run.name": "run"} | overrides
    summary = vlarl.train(vlarl.load_config("tabletop_grpo", options))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert summary.success_before == rows[0]["val/success_rate"]
    assert summary.success_after == rows[-1]["val/success_rate"]
    assert all(row["train/ratio_first_minibatch_error"] <= 1e-5 for row in rows[1:2])
    return summary.success_before, summary.success_after


def test_success_rises_when_success_is_paid(tmp_path):
    before, after = train(tmp_path)
    assert before <= 0.6
    assert after >= before + 0.3


@pytest.mark.parametrize(
    "overrides", [{"reward.source": f"{__name__}:a_coin"}, {"optim.lr": 0.0}], ids=["coin", "lr 0"]
)
def test_success_does_not_rise_when_there_is_nothing_to_learn_it_from(tmp_path, overrides):
    if overrides.get("optim.lr") == 0.0:
        overrides = overrides | {"run.iterations": 1}
    before, after = train(tmp_path, **overrides)
    assert after <= before + 0.1
    if "optim.lr" in overrides:
        assert after == before
