"""Held-out and benchmark states in one evaluation: which states, one table, and the paired test for each."""

from __future__ import annotations

import json

import pytest
from fakes.eval_records import record

from vlarl.cli.compare import compare as compare_command
from vlarl.cli.eval_display import comparison_lines, comparison_table, protocol_table, states_lines
from vlarl.config.problems import ConfigError
from vlarl.config.training_data import TrainedOn, TrainingData
from vlarl.envs.base import SuiteSpec, TaskSpec
from vlarl.evaluation.compare import compare
from vlarl.evaluation.record import EvalDirectory, EvalRecord, read_record
from vlarl.evaluation.request import EvalRequest, eval_request, on_the_same_states, same_episodes
from vlarl.evaluation.run import requested_tasks, settings_of
from vlarl.types import EpisodeResult, EvalResult

LIBERO = "libero_spatial"
TRAINED = TrainingData((TrainedOn(by="train", suite=LIBERO, protocol="disjoint", task_ids=(0, 1), states=(0, 1, 2)),))
SPEC = SuiteSpec(
    LIBERO,
    tuple(TaskSpec(i, f"do {i}", 220) for i in range(10)),
    tuple(range(30)),
    tuple(range(30, 50)),
    tuple(range(50)),
)


def requested(episodes: int | None = None, **given: object) -> EvalRequest:
    return eval_request(
        "builtin:tiny-oft",
        {"env.suite": LIBERO, "env.protocol": "both", "env.task_ids": (0, 1), **given},
        training=TRAINED,
        states_per_task=episodes,
    )


def test_the_states_of_either_protocol_are_run_once():
    every = requested()
    assert every.init_states == tuple(range(50)) and every.env.protocol == "benchmark"
    assert every.by_protocol == {"disjoint": tuple(range(30, 50)), "benchmark": tuple(range(50))}
    some = requested(2)
    assert some.init_states == (0, 1, 30, 31)
    assert len(requested_tasks(some, SPEC)) == 2 * 4


def test_two_checkpoints_run_the_same_episodes():
    a = requested(2)
    assert same_episodes(a)["env.protocol"] == "both"
    a, b = on_the_same_states(a, requested(2))
    assert a.init_states == b.init_states == (0, 1, 30, 31) and b.by_protocol == a.by_protocol


@pytest.mark.parametrize("suite", ["tabletop_spatial", "prompts_arithmetic"])
def test_a_suite_with_one_list_of_states_is_refused(suite):
    with pytest.raises(ConfigError, match=f"--protocol = both: the two protocols of {suite} have the same initial"):
        eval_request("builtin:tiny-oft", {"env.suite": suite, "env.protocol": "both"})


def evaluated(won: set[tuple[int, int]], folder=None) -> EvalRecord:
    """Two episodes of two tasks with each protocol; `won` holds (task, state)."""
    request = requested(2)
    tasks = requested_tasks(request, SPEC)
    episodes = tuple(
        EpisodeResult(task, f"do {task.task_id}", (task.task_id, task.init_state) in won, 10, 0.0, status="ok")
        for task in tasks
    )
    settings = settings_of(request, request.env, SPEC, tasks)
    return EvalRecord(settings, len(tasks), EvalResult(episodes), folder)


def test_one_table_has_both_with_their_intervals():
    lines = protocol_table(evaluated({(0, 0), (0, 30), (0, 31), (1, 1)})).splitlines()
    # Wilson's intervals by hand: 2 of 2 is z^2 = 3.8415: 2 / (2 + z^2) = 34.2%; 1 of 2: 0.5 -+ 0.4055; 2 of 4: -+ 0.35.
    assert [line.split() for line in lines] == [
        ["task", "held-out", "success", "95%", "interval", "benchmark", "success", "95%", "interval", "instruction"],
        ["0", "2/2", "100.0%", "34.2", "-", "100.0%", "1/2", "50.0%", "9.5", "-", "90.5%", "do", "0"],
        ["1", "0/2", "0.0%", "0.0", "-", "65.8%", "1/2", "50.0%", "9.5", "-", "90.5%", "do", "1"],
        ["all", "2/4", "50.0%", "15.0", "-", "85.0%", "2/4", "50.0%", "15.0", "-", "85.0%"],
    ]


def test_each_protocol_says_which_of_its_states_were_trained_on():
    assert states_lines(evaluated(set()).settings) == [
        "held-out: initial states: indices 30 to 31 of each task; none of them was trained on, says ",
        "benchmark: initial states: indices 0 to 1 of each task; 2 of them were trained on, says ",
        "benchmark: warning: 4 of 4 episodes begin from initial states that this checkpoint was trained on: the success "
        "rate says little about states that it has never seen.",
    ]


def test_the_paired_test_is_made_for_each_protocol(tmp_path, capsys):
    a = evaluated({(0, 0)}, tmp_path / "a")
    b = evaluated({(0, 30), (0, 31), (1, 30), (1, 31)}, tmp_path / "b")
    parts = compare(a, b).by_protocol()
    assert {name: (part.only_a, part.only_b) for name, part in parts.items()} == {
        "disjoint": (0, 4),
        "benchmark": (1, 0),
    }
    assert parts["disjoint"].p_value == pytest.approx(2 * 0.5**4) and parts["benchmark"].p_value == 1
    lines = comparison_lines(compare(a, b), a, b)
    assert lines[2].startswith("held-out: B wins 4, A wins 0 of 4") and "p = 0.1250" in lines[2]
    assert lines[3].startswith("benchmark: A wins 1, B wins 0 of 1")
    table = comparison_table(compare(a, b)).splitlines()
    assert [line.split()[:7] for line in table if line.startswith((" all", "held", "bench"))] == [
        ["held-out", "states"],
        ["all", "0/4", "0.0%", "4/4", "100.0%", "+100.0"],
        ["benchmark", "states"],
        ["all", "1/4", "25.0%", "0/4", "0.0%", "-25.0"],
    ]
    for each in (a, b):
        EvalDirectory.create(each.folder).write(each)
    read = read_record(tmp_path / "a")
    assert read.settings.each_protocol() == a.settings.each_protocol() and read.by_protocol()["disjoint"].won == 0
    compare_command([str(tmp_path / "a"), str(tmp_path / "b"), "--json"])
    shown = json.loads(capsys.readouterr().out)["by_protocol"]
    assert shown["disjoint"]["p_value"] == 0.125 and shown["benchmark"]["a"]["won"] == 1
    content = json.loads((tmp_path / "b" / "results.json").read_text())
    assert {name: part["won"] for name, part in content["by_protocol"].items()} == {"disjoint": 4, "benchmark": 0}


def test_an_evaluation_with_one_protocol_has_no_parts():
    one = record({(0, 30): True})
    assert one.by_protocol() == {} and compare(one, one).by_protocol() == {}
