"""Two suites in one run: trained on, evaluated and reported each by its name, resumed, and evaluated again alone."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vlarl.cli import main

SUITES = ("tabletop_spatial", "tabletop_object")
TIMES = ("time", "rollout/collection_time", "rollout/env_steps_per_s")
FLAGS = (
    *("--policy.path", "builtin:tiny-oft", "--run.device", "cpu", "--run.num_threads", "1"),
    *("--env.suites", *SUITES, "--env.task_ids", "0", "3", "--env.suite_tasks", "{tabletop_object: [1]}"),
    *("--env.num_envs", "6", "--rollout.num_groups", "3", "--rollout.group_size", "2", "--reward.source", "dense"),
    *("--curriculum.mode", "adaptive", "--run.iterations", "2", "--optim.minibatches", "1", "--algorithm.epochs", "1"),
    *("--eval.states_per_task", "2", "--eval.videos", "3", "--eval.interval", "0", "--checkpoint.interval", "1"),
    *("--optim.warmup_iterations", "0", "--no-logging.tensorboard"),
)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, without times and speeds."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES and not k.startswith(("time/", "perf/"))} for row in rows]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("suites")
    assert main(["train", *FLAGS, "--run.root", str(root), "--run.name", "two"]) == 0
    return root / "two"


def test_every_task_of_both_suites_is_trained_on_and_evaluated(run):
    episodes = read_rows(run / "episodes.jsonl")
    trained = {(e["suite"], e["task_id"]) for e in episodes if e["phase"] == "rollout"}
    evaluated = Counter((e["suite"], e["task_id"]) for e in episodes if e["phase"] == "eval" and e["iteration"] == 2)
    both = {("tabletop_spatial", 0), ("tabletop_spatial", 3), ("tabletop_object", 1)}
    assert trained == both and evaluated == dict.fromkeys(both, 2)
    states = {phase: {e["init_state"] for e in episodes if e["phase"] == phase} for phase in ("rollout", "eval")}
    assert max(states["rollout"]) < 30 <= min(states["eval"]), "held out in both suites"


def test_metrics_are_those_of_each_suite(run):
    episodes = [e for e in read_rows(run / "episodes.jsonl") if e["phase"] == "eval"]
    for row in (row for row in read_rows(run / "metrics.jsonl") if "val/success_rate" in row):
        for suite in SUITES:
            won = [e["success"] for e in episodes if e["suite"] == suite and e["iteration"] == row["iteration"]]
            assert row[f"val/{suite}/success_rate"] == sum(won) / len(won)
    last = read_rows(run / "metrics.jsonl")[-1]
    assert {"rollout/tabletop_object/success_rate", "curriculum/tabletop_object/task_01_probability"} <= set(last)
    curriculum = json.loads((run / "curriculum.json").read_text())
    assert curriculum["suite"] == "tabletop_spatial+tabletop_object"
    assert list(curriculum["tasks"]) == ["tabletop_spatial/0", "tabletop_spatial/3", "tabletop_object/1"]
    assert sum(task["episodes"] for task in curriculum["tasks"].values()) == 12
    assert sum(task["probability"] for task in curriculum["tasks"].values()) == pytest.approx(1.0)


def test_the_checkpoint_says_what_it_was_trained_on_in_each_suite(run):
    data = json.loads((run / "checkpoints" / "final" / "training_data.json").read_text())
    by_train = {entry["suite"]: entry for entry in data["trained_on"] if entry["by"] == "train"}
    assert {suite: entry["task_ids"] for suite, entry in by_train.items()} == {
        "tabletop_spatial": [0, 3],
        "tabletop_object": [1],
    }
    assert all(entry["states"] == list(range(30)) for entry in by_train.values())


def test_the_report_has_the_suites_and_their_videos(run):
    page = (run / "report.html").read_text()
    assert all(f"<b>{suite}</b>" in page and f"<h2>Curriculum: {suite}</h2>" in page for suite in SUITES)
    assert "tabletop_object task 1, state 30" in page
    assert (run / "videos").exists() and len(list((run / "videos").glob("iter_0000_tabletop_object_task01_*"))) == 1


def test_a_resumed_run_repeats_the_iteration_to_the_bit(run, tmp_path):
    again = tmp_path / "two"
    shutil.copytree(run, again)
    assert main(["train", "--resume", str(again), "--from", "step_000001"]) == 0
    assert read_rows(again / "metrics.jsonl")[-1] == read_rows(run / "metrics.jsonl")[-1]
    assert (again / "curriculum.json").read_text() == (run / "curriculum.json").read_text()


def test_an_evaluation_of_both_has_the_episodes_of_each_alone(run, tmp_path, capsys):
    """Without --suite they are those of the checkpoint's run."""
    few = ("--tasks", "1", "--episodes", "2", "--device", "cpu", "--out")
    assert main(["eval", str(run), *few, str(tmp_path / "both")]) == 0
    printed = capsys.readouterr()
    assert "on tabletop_spatial+tabletop_object, protocol disjoint" in printed.err
    assert "all of tabletop_spatial" in printed.out and "all of tabletop_object" in printed.out
    for suite in SUITES:
        assert f"30 to 31 of task 1 of {suite}; none of them was trained on" in printed.out
    together = json.loads((tmp_path / "both" / "results.json").read_text())
    assert list(together["totals"]) == list(SUITES) and [task["suite"] for task in together["tasks"]] == list(SUITES)
    assert main(["eval", "--suite", "tabletop_object", str(run), *few, str(tmp_path / "alone")]) == 0
    alone = json.loads((tmp_path / "alone" / "results.json").read_text())
    assert [e for e in together["episodes"] if e["suite"] == "tabletop_object"] == alone["episodes"]
    assert together["totals"]["tabletop_object"] == alone["total"]
    assert "totals" not in alone


def test_two_checkpoints_are_compared_on_several_suites(run, tmp_path, capsys):
    command = ["eval", "--suite", "tabletop-object", "tabletop_goal", str(run), "--against", "builtin:tiny-oft"]
    assert main([*command, "--tasks", "1", "--episodes", "1", "--device", "cpu", "--out", str(tmp_path / "pair")]) == 0
    printed = capsys.readouterr().out
    assert "all of tabletop_object" in printed and "all of tabletop_goal" in printed and "all 2 episodes" in printed
    assert main(["compare", str(tmp_path / "pair" / "A"), str(tmp_path / "pair" / "B")]) == 0
    assert "all 2 episodes" in capsys.readouterr().out
