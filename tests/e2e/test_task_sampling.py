"""Runs with an adaptive curriculum and dynamic sampling: resumed to the bit, counted in full, handed on to a new run."""

import json
from pathlib import Path
from typing import Any

import pytest

import vlarl
from vlarl.errors import UsageError
from vlarl.loop import train as run_loop

TASKS = (3, 9)  # one that the base nearly always does, one that it often fails
QUICK = {
    "run.num_threads": 1,
    "run.device": "cpu",
    "run.iterations": 3,
    "env.suite": "tabletop_goal",
    "env.task_ids": TASKS,
    "policy.path": "builtin:tiny-oft",
    "rollout.num_groups": 3,
    "rollout.group_size": 3,
    "rollout.temperature": 1.0,
    "rollout.refill": True,
    "rollout.max_refills": 1,
    "rollout.accuracy_bounds": (0.0, 1.0),
    "curriculum.mode": "adaptive",
    "curriculum.ema_alpha": 0.9,
    "optim.minibatches": 1,
    "eval.videos": 0,
    "eval.interval": 0,
    "eval.states_per_task": 1,
    "checkpoint.best_return": False,
    "logging.tensorboard": False,
    "logging.report": False,
}


def train(root: Path, name: str, resume: Path | None = None, **overrides: object) -> Path:
    options = QUICK | {"run.root": str(root), "run.name": name}
    options |= {key.replace("__", "."): value for key, value in overrides.items()}
    return run_loop(vlarl.load_config("tabletop_grpo", options), resume).run_dir


def rows(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Everything but times and speeds."""
    timed = ("time", "perf/", "rollout/collection_time", "rollout/env_steps_per_s")
    lines = [json.loads(line) for line in (run / file).read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in lines]


def curriculum(run: Path) -> dict[str, Any]:
    return json.loads((run / "curriculum.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("curriculum"), "whole")


def test_every_group_is_counted_and_only_mixed_ones_are_trained_on(whole):
    episodes = [e for e in rows(whole, "episodes.jsonl") if e["phase"] == "rollout"]
    for row in rows(whole)[1:]:
        own = [e for e in episodes if e["iteration"] == row["iteration"]]
        outcomes = {e["group"]: [o["success"] for o in own if o["group"] == e["group"]] for e in own}
        mixed = [group for group, won in sorted(outcomes.items()) if 0 < sum(won) < 3]
        assert sorted(outcomes) == list(range(len(outcomes))), "refilled groups are numbered on"
        assert row["rollout/groups_refilled"] == len(outcomes) - 3
        assert row["rollout/groups_dropped"] == len(outcomes) - len(mixed)
        assert row["rollout/refill_rounds"] == (len(outcomes) > 3)
        assert row["train/kept_trajectories"] == 3 * len(mixed[:3])
        assert row["rollout/num_trajectories"] == len(own) == 3 * len(outcomes)
        assert row["rollout/success_rate"] == pytest.approx(sum(e["success"] for e in own) / len(own)), (
            "of all episodes"
        )
    assert any(row["rollout/groups_refilled"] > 0 for row in rows(whole)[1:]), "nothing was shown"
    counters = json.loads((whole / "checkpoints" / "final" / "trainer.json").read_text())
    assert (counters["episodes"], counters["env_steps"]) == (len(episodes), sum(e["length"] for e in episodes))


def test_the_curriculum_is_what_the_episodes_say(whole):
    episodes = [e for e in rows(whole, "episodes.jsonl") if e["phase"] == "rollout"]
    final, known = rows(whole)[-1], curriculum(whole)
    assert known["iteration"] == 3 and known["suite"] == "tabletop_goal" and known["mode"] == "adaptive"
    for task in TASKS:
        won = [e["success"] for e in episodes if e["task_id"] == task]
        ages = range(len(won) - 1, -1, -1)
        mean = sum(0.9**age * w for age, w in zip(ages, won, strict=True)) / sum(0.9**age for age in ages)
        assert known["tasks"][str(task)]["episodes"] == len(won)
        assert final[f"curriculum/task_{task:02d}_success"] == pytest.approx(mean)
        assert final[f"curriculum/task_{task:02d}_probability"] == known["tasks"][str(task)]["probability"]
    assert known["tasks"]["3"]["success"] > known["tasks"]["9"]["success"], "as the base is"


def test_a_resumed_run_samples_what_the_undisturbed_one_sampled(whole, tmp_path):
    run = train(tmp_path, "parts", run__iterations=2)
    train(tmp_path, "parts", resume=run)
    assert rows(run)[3] == rows(whole)[3]
    final = [e for e in rows(whole, "episodes.jsonl") if e["iteration"] == 3]
    assert [e for e in rows(run, "episodes.jsonl") if e["iteration"] == 3] == final
    assert curriculum(run) == curriculum(whole)


def test_a_new_run_begins_with_what_an_earlier_one_knew(whole, tmp_path):
    run = train(tmp_path, "next", run__iterations=1, curriculum__start_from=str(whole))
    before, after = curriculum(whole)["tasks"], curriculum(run)["tasks"]
    seen = [e["task_id"] for e in rows(run, "episodes.jsonl") if e["phase"] == "rollout"]
    assert {t: after[t]["episodes"] - before[t]["episodes"] for t in before} == {str(t): seen.count(t) for t in TASKS}
    with pytest.raises(UsageError, match="cannot read .*nowhere"):
        train(tmp_path, "refused", curriculum__start_from=str(tmp_path / "nowhere"))
    assert not (tmp_path / "refused").exists(), "what is refused leaves nothing behind"
