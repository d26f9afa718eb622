"""`vlarl eval` and `vlarl compare`: what they refuse, do and print."""

import io
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.eval_records import SETTINGS, episode, record
from fakes.responses import prompt_of, responded
from rich.console import Console

from vlarl.cli import main
from vlarl.cli.compare import compare
from vlarl.cli.eval_display import (
    EpisodeCounter,
    closing_lines,
    comparison_lines,
    comparison_table,
    states_lines,
    success_table,
)
from vlarl.cli.evaluate import _more_tasks, _options, _parser, _request
from vlarl.config.training_data import TrainedOn, TrainingData, write_training_data
from vlarl.errors import UsageError
from vlarl.evaluation.compare import compare as compare_records
from vlarl.evaluation.record import EvalDirectory, EvalRecord, read_record
from vlarl.types import EvalResult

REPLAY = ["eval", "x", "--episode", "tabletop_goal-t00-s030-0000000000000001"]


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval"], "the following arguments are required: CHECKPOINT (see `vlarl eval --help`)"),
        (["eval", "x", "--videos", "some"], "argument --videos: 'some' must be all, failures, none or a count"),
        (["eval", "x", "--videos", "-1"], "argument --videos: '-1' must be all, failures, none or a count"),
        (["eval", "x", "--num-envs", "0"], "argument --num-envs: '0' must be an integer >= 1 (see `vlarl eval --help`)"),
        (["eval", "x", "--temperature", "hot"], "argument --temperature: 'hot' must be a number >= 0 (see `vlarl eval --help`)"),
        (["eval", "x", "--tasks", "4", "4"], "--tasks = [4, 4]: task 4 given more than once; name each task once"),
        (["eval", "x", "--protocol", "unseen"], "argument --protocol: invalid choice: 'unseen'"),
        (["eval", "x", "--optim.lr", "1"], "--optim.lr: unknown option; it is one of `vlarl train`"),
        (["eval", "x", "--policy.actoins", "l1"], "--policy.actoins: unknown option; did you mean --policy.actions?"),
        (["eval", "x", "y"], "y: unexpected argument"),
        (["eval", "x", "--episodes", "21"], "--episodes = 21: a task of tabletop_spatial has 20 initial states"),
        ([*REPLAY, "--tasks", "1", "--seed", "0"], "--episode says which episode to run, and a video of it is recorded: leave out --tasks, --seed"),
        (["eval", "x", "--episode", "y"], "'y' is not an episode id: take one from episodes.jsonl"),
        (["eval", "x"], "x is not a checkpoint: there is no folder or run of that name. runs/ holds no runs with a checkpoint. Give a run's name"),
        (["eval", "builtin:tiny-oft", "--out", "."], ". exists already, and results are never overwritten: name a new folder."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_nothing_is_written(work, capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err.splitlines()[-1]
    assert list(work.iterdir()) == []


def test_eval_names_the_nearest_suite(capsys):
    assert main(["eval", "x", "--suite", "tabletop_gol"]) == 2
    assert "did you mean 'tabletop_goal'?" in capsys.readouterr().err


BUILTIN = "builtin:tiny-oft"  # turns the stove on (task 3), and can't put the bowl on the plate (task 0)
GOALS = ["--suite", "tabletop_goal", "--tasks", "0", "3", "--episodes", "1", "--device", "cpu"]


def test_an_evaluation_and_its_episodes_again(work, capsys):
    assert main(["eval", BUILTIN, *GOALS, "--out", "evals/a"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "task  won  success   95% interval  steps  instruction",
        "   0  0/1     0.0%    0.0 - 79.3%   32.0  put the bowl on the plate",
        "   3  1/1   100.0%  20.7 - 100.0%    7.0  turn on the stove",
        " all  1/2    50.0%    9.5 - 90.5%   19.5",
        f"initial state: index 30 of each task; it was not trained on, says {BUILTIN}/training_data.json",
        "results: evals/a",
    ]
    assert captured.err.startswith(f"evaluating {BUILTIN} on tabletop_goal, protocol benchmark, into evals/a\n")
    lost, won = read_record(Path("evals/a")).result.episodes
    assert main(["eval", BUILTIN, "--episode", won.task.episode_id, "--device", "cpu"]) == 0
    first, second, _, third = capsys.readouterr().out.splitlines()
    assert first == f"{won.task.episode_id}: success after 7 steps (turn on the stove)"
    assert second == "the same as recorded in evals/a"
    folder = Path(third.removeprefix("results: "))
    assert folder.parent == Path("evals") and folder.name.startswith("builtin-tiny-oft_tabletop_goal_")
    assert len(list(folder.glob("videos/*_success.mp4"))) == 1

    content = json.loads(Path("evals/a/results.json").read_text())
    content["episodes"][1] |= {"length": 5}
    Path("evals/a/results.json").write_text(json.dumps(content))
    again = ["eval", BUILTIN, "--episode", won.task.episode_id, "--device", "cpu"]
    assert main(again) == 0
    assert capsys.readouterr().out.splitlines()[1] == "not as recorded in evals/a: success after 5 steps"
    assert main([*again, "--temperature", "0.5"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "no evaluation in evals has this episode of this checkpoint with temperature 0.5"
    )


def test_two_checkpoints_on_the_same_episodes(work, capsys, checkpoint):
    assert main(["eval", str(checkpoint), "--against", BUILTIN, *GOALS, "--out", "both"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "task    A          B           B - A  instruction",
        "   0  0/1  0.0%  0/1    0.0%    +0.0  put the bowl on the plate",
        "   3  0/1  0.0%  1/1  100.0%  +100.0  turn on the stove",
        " all  0/2  0.0%  1/2   50.0%   +50.0",
        f"A: {checkpoint}",
        f"B: {BUILTIN}",
        "B wins 1, A wins 0 of 1 episode on which they differ (2 compared): p = 1.0000, that may be chance.",
        f"A: initial state: index 30 of each task; it was not trained on, says {checkpoint}/training_data.json",
        f"B: initial state: index 30 of each task; it was not trained on, says {BUILTIN}/training_data.json",
        "results: both/A",
        "results: both/B",
    ]
    assert compare(["both/A", "both/B", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["checkpoint_a"], content["only_b_won"], content["p_value"]) == (str(checkpoint), 1, 1.0)
    assert main(["eval", str(checkpoint), "--against", BUILTIN, *GOALS, "--out", "both"]) == 2, "never overwritten"


def test_against_leaves_out_what_either_was_trained_on(work, capsys, checkpoint):
    for name, states in (("a", (30, 31)), ("b", (33, 34))):
        shutil.copytree(checkpoint, work / name)
        run = TrainedOn(by="train", suite="tabletop_goal", protocol="disjoint", task_ids=(3,), states=states)
        write_training_data(work / name, TrainingData((run,)))
    flags = ["--tasks", "3", "--episodes", "2", "--device", "cpu"]
    assert main(["eval", "a", "--against", "b", *flags, "--out", "both"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "A: initial states: indices 32, 35 of task 3; none of them was trained on, says a/training_data.json" in lines
    )
    assert (
        "B: initial states: indices 32, 35 of task 3; none of them was trained on, says b/training_data.json" in lines
    )
    for name in "AB":
        content = json.loads(Path(f"both/{name}/results.json").read_text())
        assert ([e["init_state"] for e in content["episodes"]], content["warnings"]) == ([32, 35], [])
    assert main(["eval", "a", "--against", "b", *flags, "--protocol", "benchmark", "--episodes", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    warned = [line.partition(": warning: ")[::2] for line in lines if "warning: " in line]
    assert [name for name, _ in warned] == ["A", "B"]
    assert all(text.startswith("2 of 20 episodes begin from initial states that this") for _, text in warned)
    assert compare(["both/A", "both/B", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["warnings_a"] == content["warnings_b"] == []


def test_ctrl_c_ends_with_130_and_keeps_what_has_ended(work, capsys, monkeypatch):
    monkeypatch.setattr(EpisodeCounter, "__call__", lambda self, *result: signal.raise_signal(signal.SIGINT))
    assert main(["eval", BUILTIN, *GOALS, "--num-envs", "1", "--out", "stopped"]) == 130
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "interrupted: 1 of 2 episodes had finished and are kept. Successes end first, so the rate may be too high.",
        "results: stopped",
    ]
    content = json.loads(Path("stopped/results.json").read_text())
    assert (content["complete"], content["total"]["episodes"], content["num_planned"]) == (False, 1, 2)
    both = ["eval", BUILTIN, "--against", BUILTIN, *GOALS, "--num-envs", "1", "--out", "both"]
    assert main(both) == 130
    assert [path.name for path in Path("both").iterdir()] == ["A"], "the second one is not begun"


OUTCOMES = {(0, 1): True, (0, 2): True, (7, 1): False, (7, 2): True, (7, 3): None, (8, 1): None}


def test_the_table_counts_crashes_neither_as_won_nor_as_lost():
    knowledge = {"num_trained_states": 2, "init_states": (1, 2, 3), "training_data_from": "x/training_data.json"}
    made = record(OUTCOMES, folder=Path("somewhere"), planned=9, warnings=("mind this.",), **knowledge)
    assert success_table(made.result).splitlines() == [
        "task  won  success   95% interval  steps  instruction",
        "   0  2/2   100.0%  34.2 - 100.0%   10.0  do 0",
        "   7  1/2    50.0%    9.5 - 90.5%   10.0  do 7",
        "   8  0/0        -              -      -  do 8",
        " all  3/4    75.0%   30.1 - 95.4%   10.0",
    ]
    assert closing_lines(made) == [
        "2 of 6 episodes could not be run because the simulator failed, and count neither as won nor as lost.",
        "initial states: indices 1 to 3 of each task; 2 of them were trained on, says x/training_data.json",
        "warning: mind this.",
        "interrupted: 6 of 9 episodes had finished and are kept. Successes end first, so the rate may be too high.",
        "results: somewhere",
    ]
    num_retries = replace(made.result.episodes[0], num_retries=2)
    again = replace(made, result=replace(made.result, episodes=(num_retries,), complete=True), folder=None)
    assert closing_lines(again)[0] == "2 times an episode was retried because its simulator had died."


def test_prompts_are_counted_in_their_own_words():
    prompt = prompt_of("What is 3 plus 4?", "7")
    episodes = (
        responded("7", prompt, True, 1.0, 300, num_tokens=2),
        responded("8", prompt, False, 0.0, 301, num_tokens=5),
        responded("", prompt, state=302, status="crashed"),
    )
    settings = replace(SETTINGS, suite="prompts_arithmetic", task_ids=(0,), init_states=(300, 301, 302))
    made = EvalRecord(settings, 5, EvalResult(episodes, complete=False))
    assert success_table(made.result).splitlines() == [
        "task  correct  accuracy  95% interval  tokens  a prompt of the task",
        "   0      1/2     50.0%   9.5 - 90.5%     3.5  What is 3 plus 4?",
        " all      1/2     50.0%   9.5 - 90.5%     3.5",
    ]
    assert closing_lines(made) == [
        "1 of 3 responses could not be run because the prompt can't be used, and count neither as correct nor as wrong.",
        "prompts: indices 300 to 302 of task 0; whether they were trained on is not known",
        "interrupted: 3 of 5 responses had finished and are kept.",
    ]
    unjudged = EvalRecord(settings, 1, EvalResult((responded("a", prompt_of("Write a poem.")),)))
    assert closing_lines(unjudged)[0] == (
        "no prompt has a solution (prompts.solution_column), so the accuracy says nothing."
    )


@pytest.mark.parametrize(
    ("states", "tasks", "trained", "line"),
    [
        ((0,), (0, 1), 1, "initial state: index 0 of each task; it was trained on, says x"),
        ((7,), (4,), 0, "initial state: index 7 of task 4; it was not trained on, says x"),
        ((7,), (4,), None, "initial state: index 7 of task 4; whether it was trained on is not known"),
        (
            (3, 4),
            (0, 1),
            None,
            "initial states: indices 3 to 4 of each task; whether they were trained on is not known",
        ),
        ((3, 4), (2,), 1, "initial states: indices 3 to 4 of task 2; 1 of them was trained on, says x"),
        (
            range(30, 50),
            (0, 1),
            0,
            "initial states: indices 30 to 49 of each task; none of them was trained on, says x",
        ),
    ],
)
def test_initial_states_in_words(states, tasks, trained, line):
    knowledge = {"num_trained_states": trained, "init_states": tuple(states), "training_data_from": "x"}
    made = record(OUTCOMES, **knowledge)
    assert states_lines(replace(made.settings, task_ids=tasks)) == [line]


def test_a_comparison_names_what_it_leaves_out():
    a = record({(0, state): True for state in range(9)}, checkpoint="one")
    b = record({(0, 0): False, (0, 1): None}, checkpoint="two", planned=9)
    comparison = compare_records(a, b)
    assert comparison_table(comparison).splitlines()[1] == "   0  1/1  100.0%  0/1  0.0%  -100.0  do 0"
    ids = [episode(0, state, True).task.episode_id for state in range(1, 6)]
    assert comparison_lines(comparison, a, b) == [
        "A: one",
        "B: two",
        "A wins 1, B wins 0 of 1 episode on which they differ (1 compared): p = 1.0000, that may be chance.",
        f"8 episodes of A are left out, because B has none: {', '.join(ids)} and 3 more",
        "B is not complete: 2 of 9 episodes.",
    ]


def test_compare_reads_folders(tmp_path, capsys):
    for name, success in (("a", True), ("b", False)):
        EvalDirectory.create(tmp_path / name).write(record({(0, 1): success, (0, 2): True}))
    assert compare([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["task", "A", "B", "B", "-", "A", "instruction"]
    with pytest.raises(UsageError, match="is not an evaluation"):
        compare([str(tmp_path / "a"), str(tmp_path)])


def evaluated_run(work: Path, name: str, *outcomes: bool, **settings: object) -> Path:
    """A run with one evaluation for each outcome."""
    run = work / "runs" / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("env: {suite: tabletop_spatial}\n")
    for number, success in enumerate(outcomes):
        made = record({(0, 1): success, (0, 2): True}, checkpoint=name, **settings)
        EvalDirectory.create(run / "eval" / f"e{number}").write(made)
    return run


def test_runs_that_have_one_evaluation_each_are_compared(work, capsys):
    evaluated_run(work, "a", True)
    evaluated_run(work, "b", False)
    assert main(["compare", "a", "runs/b"]) == 0
    assert capsys.readouterr().out.splitlines()[-3].endswith("A: a")


def test_runs_without_or_with_several_evaluations_are_refused_with_the_command_to_use(work, capsys):
    evaluated_run(work, "none")
    evaluated_run(work, "replayed", True, replay_of="x")
    evaluated_run(work, "two", True, False)
    for name in ("none", "replayed"):
        assert main(["compare", name, "two"]) == 2
        message = capsys.readouterr().err
        assert (
            f"the run runs/{name} has no complete evaluation" in message
            and f"vlarl eval {name} --against two" in message
        )
    assert main(["compare", "two", "none"]) == 2
    message = capsys.readouterr().err
    assert "the run runs/two has 2 evaluations" in message
    assert "runs/two/eval/e0" in message and "runs/two/eval/e1" in message


def run_on_tasks(work: Path, task_ids: str) -> None:
    checkpoint = work / "runs" / "mine" / "checkpoints" / "final"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    env = f"env: {{suite: tabletop_goal, task_ids: {task_ids}}}\n"
    (work / "runs" / "mine" / "config.yaml").write_text(env)


@pytest.mark.parametrize(
    ("task_ids", "flags", "line"),
    [
        (
            "[0, 3]",
            [],
            "its run was trained on tasks 0, 3 only; all tasks are evaluated (--tasks 0 3: only those of the run",
        ),
        ("[4]", [], "its run was trained on task 4 only; all tasks are evaluated (--tasks 4: only those of the run)"),
        ("[0, 3]", ["--tasks", "0", "3"], None),
        ("[0, 3]", ["--suite", "tabletop_object"], None),
        ("null", [], None),
    ],
)
def test_a_run_that_was_trained_on_some_tasks_is_said_to_be_measured_on_all(work, capsys, task_ids, flags, line):
    run_on_tasks(work, task_ids)
    given, _ = _parser().parse_known_args(["runs/mine/checkpoints/final", *flags])
    said = _more_tasks(_request(given.checkpoint, given, _options(given, [])), given.tasks)
    assert said == "" if line is None else said.startswith(line)


def test_the_checkpoint_that_is_taken_of_a_run_is_said(work, capsys):
    run_on_tasks(work, "[0]")
    assert main(["eval", "mine", "--device", "cpu", "--num-envs", "1"]) == 2, "its config.json is empty"
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "runs/mine: its checkpoints/final is taken"
    assert lines[1].startswith("its run was trained on task 0 only")
    assert lines[2].startswith(
        "evaluating runs/mine/checkpoints/final on tabletop_goal, protocol disjoint, into runs/mine/"
    )


def test_the_counter_says_now_and_then_how_far_it_is():
    text = io.StringIO()
    with EpisodeCounter("suite", Console(file=text, width=80)) as counter:
        for done in range(1, 41):
            counter(episode(0, done, None if done == 1 else done % 2 == 0), done, 40)
    lines = text.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "suite: 4/40 episodes, 66.7% won, 0:00 elapsed, 0:00 left"
    assert lines[-1] == "suite: 40/40 episodes, 51.3% won, 0:00 elapsed, 0:00 left"


def test_in_a_terminal_the_counter_is_a_bar_that_goes_away():
    text = io.StringIO()
    with EpisodeCounter("suite", Console(file=text, force_terminal=True, width=100)) as counter:
        counter(episode(0, 1, True), 1, 2)
        counter(episode(0, 2, False), 2, 2)
    assert "1/2" in text.getvalue() or "2/2" in text.getvalue()
    assert "50.0% won" in text.getvalue() and "episodes," not in text.getvalue()


def test_compare_and_the_help_of_eval_load_no_torch():
    code = (
        "import sys; from vlarl.cli.compare import compare; from vlarl.cli import main\n"
        "for command in (lambda: compare(['a', 'b']), lambda: main(['eval', '--help'])):\n"
        "    try:\n        command()\n    except (SystemExit, Exception):\n        pass\n"
        "print('LOADED', sorted({'torch', 'transformers', 'mujoco'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []" and "--against" in done.stdout
