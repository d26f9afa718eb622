"""The loop learns from the reward, and from nothing else: the shipped base model, a few iterations, two tasks."""

import json
import zlib

import vlarl
from vlarl.types import Trajectory

QUICK = {
    "run.num_threads": 1,
    "run.iterations": 3,
    "env.task_ids": [1, 4],
    "rollout.num_groups": 8,
    "rollout.group_size": 6,
    "eval.states_per_task": 10,
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


def test_success_rises_when_success_is_rewarded(tmp_path):
    before, after = train(tmp_path)
    assert before <= 0.6
    assert after >= before + 0.4


def test_success_does_not_rise_when_the_reward_ignores_it(tmp_path):
    # Without a discount, which would make the coin worth more to an episode that success ends early.
    before, after = train(tmp_path, **{"reward.source": f"{__name__}:a_coin", "algorithm.verifier_gamma": 1.0})
    assert after <= before + 0.2


def test_success_stays_when_the_learning_rate_is_zero(tmp_path):
    before, after = train(tmp_path, **{"optim.lr": 0.0, "run.iterations": 1, "rollout.num_groups": 2})
    assert after == before


def test_demonstrations_are_imitated_while_success_rises(tmp_path):
    """In nats an action token: the flawed base model has to become more like the perfect experts."""
    few = {"run.iterations": 3, "env.task_ids": [0], "rollout.num_groups": 4, "rollout.group_size": 8}
    imitating = {"ptx.path": "experts", "ptx.coef": 0.5, "ptx.batch_size": 64, "ptx.episodes_per_task": 4}
    before, after = train(tmp_path, **few | imitating, **{"optim.lr": 3e-4, "eval.states_per_task": 4})
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses, rates = ([row[name] for row in rows[1:]] for name in ("train/ptx_loss", "rollout/success_rate"))
    assert after > before and rates[-1] > rates[0] + 0.3
    assert losses[0] > losses[1] > losses[2] and losses[2] < 0.9 * losses[0]
    trained_on = json.loads((tmp_path / "run" / "checkpoints" / "final" / "training_data.json").read_text())
    assert {run["by"] for run in trained_on["trained_on"]} == {"finetune", "train"}
