"""A checkpoint that leaves the folder of its run still knows what it was trained on, and `vlarl eval` uses it."""

import json
import shutil
from pathlib import Path

import pytest

from vlarl.cli import main
from vlarl.config.training_data import FILE_NAME, read_training_data

TRAINED = set(range(30, 50))  # the tabletop's benchmark states, all of which are its evaluation states


def flags(root: Path, *extra: str) -> list[str]:
    return [
        "train",
        *("--policy.path", "builtin:tiny-oft", "--run.root", str(root), "--run.name", "exam"),
        *("--run.iterations", "1", "--run.num_threads", "1", "--run.device", "cpu"),
        *("--env.suite", "tabletop_goal", "--env.task_ids", "3", "--env.protocol", "benchmark"),
        *(
            "--rollout.num_groups",
            "2",
            "--rollout.group_size",
            "2",
            "--eval.states_per_task",
            "1",
            "--eval.videos",
            "0",
        ),
        *("--lora.enabled", "--lora.rank", "2", "--ema.beta", "0.9", "--checkpoint.interval", "1"),
        *("--no-logging.tensorboard", *extra),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    assert main(flags(root)) == 0
    return root / "exam"


def evaluated(checkpoint: Path, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[dict, list[str]]:
    """results.json of an evaluation, and what it printed."""
    capsys.readouterr()
    command = ["eval", str(checkpoint), "--tasks", "3", "--episodes", "2", "--device", "cpu", "--out", str(out), *more]
    assert main(command) == 0
    return json.loads((out / "results.json").read_text()), capsys.readouterr().out.splitlines()


def test_every_policy_that_a_run_saves_says_what_it_was_trained_on(run):
    saved = {path.name for path in (run / "checkpoints").iterdir()}
    assert saved == {"best_return", "ema", "final"}
    for name in saved:
        data = read_training_data(run / "checkpoints" / name)
        assert data is not None and data.states("tabletop_goal", None, 3) == TRAINED
        assert data.states("tabletop_goal", None, 0) == set() and data.protocol("tabletop_goal") == "benchmark"
        assert [trained.by for trained in data.runs] == ["finetune"] * 4 + ["train"], "the built-in base's, and its own"


def test_a_merged_and_a_copied_checkpoint_are_measured_as_in_their_run(run, tmp_path, capsys):
    assert main(["merge", str(run / "checkpoints" / "final"), str(tmp_path / "merged")]) == 0
    shutil.copytree(run / "checkpoints" / "best_return", tmp_path / "copied")
    warning = (
        "warning: 2 of 2 episodes begin from initial states that this checkpoint was trained on: the success rate says "
        "little about states that it has never seen."
    )
    for name, checkpoint in (
        ("at_home", run / "checkpoints" / "final"),
        ("merged", tmp_path / "merged"),
        ("copied", tmp_path / "copied"),
    ):
        results, lines = evaluated(checkpoint, tmp_path / f"eval_{name}", capsys)
        assert (results["suite"], results["protocol"]) == ("tabletop_goal", "benchmark")
        assert (results["init_states"], results["num_trained_states"]) == ([30, 31], 2)
        assert results["training_data_from"] == f"{checkpoint}/{FILE_NAME}"
        assert [f"warning: {text}" for text in results["warnings"]] == [warning]
        assert (
            lines[-3]
            == f"initial states: indices 30 to 31 of task 3; 2 of them were trained on, says {checkpoint}/{FILE_NAME}"
        )
        assert lines[-2] == warning


def test_a_checkpoint_that_lost_its_file_is_measured_with_a_warning(run, tmp_path, capsys):
    copied = Path(shutil.copytree(run / "checkpoints" / "best_return", tmp_path / "copied"))
    (copied / FILE_NAME).unlink()
    results, lines = evaluated(copied, tmp_path / "x", capsys, "--suite", "tabletop_goal")
    assert (results["num_trained_states"], results["training_data_from"]) == (None, None)
    assert lines[-3] == "initial states: indices 30 to 31 of task 3; whether they were trained on is not known"
    assert lines[-2].startswith(
        "warning: this checkpoint does not say which initial states it was trained on (it has no"
    )
    (run / "checkpoints" / "final" / FILE_NAME).rename(tmp_path / "kept")
    try:  # in its run, as runs from before have left it
        results, lines = evaluated(run / "checkpoints" / "final", tmp_path / "y", capsys)
        assert (results["num_trained_states"], results["training_data_from"]) == (2, str(run / "config.yaml"))
    finally:
        (tmp_path / "kept").rename(run / "checkpoints" / "final" / FILE_NAME)
    (copied / FILE_NAME).write_text("{}")
    assert main(["eval", str(copied)]) == 2
    assert f"{copied / FILE_NAME} does not say what the checkpoint was trained on" in capsys.readouterr().err


def test_the_report_says_so(run):
    text = (run / "report.html").read_text()
    assert "episodes whose initial states were also trained on" in text and "training never saw" not in text
