"""`rollout.save` and `rollout.videos` in whole runs: nothing else changes, and a killed run loses and repeats nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlarl.cli import main
from vlarl.data.lerobot.reader import LeRobotDataset
from vlarl.data.rlds.reader import RldsDataset
from vlarl.evaluation.request import task_of

SUITE = "tabletop_goal"


def flags(checkpoint: Path, root: Path, name: str, *extra: str) -> list[str]:
    return [
        *("train", "--policy.path", str(checkpoint), "--run.root", str(root), "--run.name", name),
        *("--run.iterations", "4", "--run.num_threads", "1", "--run.device", "cpu"),
        *("--env.suite", SUITE, "--env.task_ids", "0", "3", "--env.num_envs", "4"),
        *("--rollout.num_groups", "2", "--rollout.group_size", "2", "--reward.source", "dense"),
        *("--optim.lr", "1e-3", "--optim.warmup_iterations", "0", "--optim.minibatches", "2"),
        *("--algorithm.epochs", "1", "--eval.states_per_task", "1", "--eval.interval", "0", "--eval.videos", "0"),
        *("--checkpoint.interval", "2", "--no-logging.tensorboard"),
        *extra,
    ]


def rows(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Everything but times and speeds, which are never equal."""
    lines = [json.loads(line) for line in (run / file).read_text().splitlines()]
    timed = ("time", "rollout/collection_time", "rollout/env_steps_per_s")
    return [{k: v for k, v in row.items() if k not in timed and not k.startswith(("time/", "perf/"))} for row in lines]


def trained_on(run: Path) -> list[str]:
    return [row["episode_id"] for row in rows(run, "episodes.jsonl") if row["phase"] == "rollout"]


def saved(run: Path) -> list[str]:
    return [each.texts("episode_metadata/file_path")[0] for each in RldsDataset(run / "data" / SUITE)]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


KILLED = """
import os, signal, sys
from vlarl.cli import main
from vlarl.run.session import Session

end_iteration = Session.end_iteration

def end_and_kill(self, metrics):
    end_iteration(self, metrics)
    if self.state.iteration == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

Session.end_iteration = end_and_kill
main(sys.argv[2:])
"""


def killed_after(iteration: int, arguments: list[str]) -> None:
    """Run a command whose process is killed at the end of an iteration, after what is due then was saved."""
    command = [sys.executable, "-c", KILLED, str(iteration), *arguments, "--run.iterations", "600"]
    killed = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saves all its episodes and records videos, and that nothing disturbs."""
    root = tmp_path_factory.mktemp("whole")
    assert main(flags(checkpoint, root, "run", "--rollout.save", "rlds", "--rollout.videos", "1")) == 0
    return root / "run"


def test_saving_changes_nothing_else(whole, checkpoint, tmp_path):
    assert main(flags(checkpoint, tmp_path, "plain", "--no-logging.report")) == 0
    assert rows(tmp_path / "plain") == rows(whole)
    assert rows(tmp_path / "plain", "episodes.jsonl") == rows(whole, "episodes.jsonl")
    assert not (tmp_path / "plain" / "data").exists() and not list((tmp_path / "plain" / "videos").iterdir())


def test_every_training_episode_is_saved_as_it_was(whole):
    assert saved(whole) == trained_on(whole) and len(saved(whole)) == 16
    episodes = {row["episode_id"]: row for row in rows(whole, "episodes.jsonl")}
    for each in RldsDataset(whole / "data" / SUITE):
        row = episodes[each.texts("episode_metadata/file_path")[0]]
        assert len(each) == row["length"] and bool(each.values("steps/is_terminal")[-1]) == row["success"]
        assert float(each.values("steps/reward").sum()) == pytest.approx(row["return"], abs=1e-5)
        assert each.texts("steps/language_instruction")[0] == row["instruction"]


def test_finetune_and_inspect_read_it(whole, checkpoint, tmp_path, capsys):
    path = whole / "data" / SUITE
    assert main(["data", "inspect", str(path)]) == 0
    assert "episodes:  16" in capsys.readouterr().out
    options = ("--demos.path", str(path), "--policy.path", str(checkpoint), "--optim.steps", "2")
    small = ("--optim.batch_size", "4", "--optim.warmup_steps", "1", "--run.device", "cpu", "--run.num_threads", "1")
    folder = ("--run.root", str(tmp_path), "--run.name", "tuned")
    assert main(["finetune", *options, *small, *folder]) == 0
    trained = json.loads((tmp_path / "tuned/checkpoints/final/training_data.json").read_text())["trained_on"]
    assert [each["suite"] for each in trained][-1] in (SUITE, "tabletop")


def test_training_videos_are_in_the_folder_and_in_the_report(whole):
    names = sorted(path.name for path in (whole / "videos").iterdir())
    assert [name[:12] for name in names] == [f"rollout_{iteration:04d}" for iteration in (1, 2, 3, 4)]
    for iteration, name in enumerate(names, start=1):
        first = [row for row in rows(whole, "episodes.jsonl") if row["iteration"] == iteration][0]
        outcome = "success" if first["success"] else "failure"
        where = f"task{first['task_id']:02d}_state{first['init_state']:02d}"
        assert name == f"rollout_{iteration:04d}_{where}_group0_0_{outcome}.mp4"
    report = (whole / "report.html").read_text()
    assert "Training episodes" in report and "Some of the episodes of iteration 4." in report
    assert report.count("data:video/mp4") == 1


def test_a_killed_and_resumed_run_has_the_undisturbed_runs_dataset(whole, checkpoint, tmp_path):
    """Killed after its third iteration, it resumes from the second: to the byte."""
    run = tmp_path / "run"
    killed_after(3, flags(checkpoint, tmp_path, "run", "--rollout.save", "rlds"))
    assert saved(run) == trained_on(run)[:8], "as new as the checkpoint, and readable"
    assert main(["train", "--resume", str(run), "--run.iterations", "4"]) == 0
    assert trained_on(run) == trained_on(whole)
    assert files(run / "data") == files(whole / "data")


def test_going_back_to_an_earlier_checkpoint_drops_what_was_saved_after_it(whole, checkpoint, tmp_path):
    run = tmp_path / "run"
    save = ("--rollout.save", "rlds", "--checkpoint.interval", "1", "--checkpoint.keep", "9", "--no-logging.report")
    assert main([*flags(checkpoint, tmp_path, "run", *save)]) == 0
    assert saved(run) == saved(whole)
    back = ["train", "--resume", str(run), "--from", "step_000002", "--run.iterations", "3", "--rollout.save", "none"]
    assert main(back) == 0
    assert saved(run) == saved(whole)[:8], "also where the episodes that follow are not saved"


def test_one_in_so_many_and_successes_alone_as_lerobot(whole, tmp_path):
    """By the built-in policy, which succeeds."""
    arguments = flags(Path("builtin:tiny-oft"), tmp_path, "run", "--run.iterations", "2", "--no-logging.report")
    arguments[arguments.index("--reward.source") + 1] = "sparse"
    arguments[arguments.index("--rollout.num_groups") + 1] = "6"
    save = ("--rollout.save", "lerobot", "--rollout.save_fps", "10", "--rollout.save_every", "3")
    assert main([*arguments, *save, "--rollout.save_filter", "successes"]) == 0
    every_third = [row for row in rows(tmp_path / "run", "episodes.jsonl") if row["phase"] == "rollout"][::3]
    expected = [row["episode_id"] for row in every_third if row["success"]]
    dataset = LeRobotDataset(tmp_path / "run" / "data" / SUITE)
    assert 0 < len(expected) < len(every_third) and dataset.fps == 10
    assert [each.metadata["file_path"] for each in dataset] == expected
    assert all(each.values("next.success")[-1] for each in dataset)


SEGMENTS = (
    *("--algorithm.name", "ppo", "--algorithm.critic_hidden", "16", "--rollout.num_steps", "10"),
    *("--rollout.group_size", "1", "--run.iterations", "6", "--rollout.save", "rlds", "--no-logging.report"),
)


def of_segments(checkpoint: Path, root: Path) -> list[str]:
    arguments = flags(checkpoint, root, "run", *SEGMENTS)
    del arguments[arguments.index("--rollout.num_groups") : arguments.index("--rollout.num_groups") + 2]
    arguments[arguments.index("--checkpoint.interval") + 1] = "3"  # when episodes of 32 steps are under way
    return arguments


def test_episodes_of_several_iterations_are_saved_whole_and_after_a_kill_too(checkpoint, tmp_path):
    """With rollouts of a fixed length: what was executed before the checkpoint is recorded again."""
    assert main(of_segments(checkpoint, tmp_path / "whole")) == 0
    whole, run = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    assert saved(whole) == trained_on(whole) and len(saved(whole)) >= 4
    lengths = {row["episode_id"]: row["length"] for row in rows(whole, "episodes.jsonl")}
    steps = [len(each) for each in RldsDataset(whole / "data" / SUITE)]
    assert steps == [lengths[name] for name in saved(whole)] and max(steps) > 16, "of more than one segment"
    killed_after(4, of_segments(checkpoint, tmp_path / "killed"))
    (saved_at,) = (run / "checkpoints").glob("step_*")
    under_way = json.loads((saved_at / "trainer.json").read_text())["open_episodes"]["episodes"]
    assert any(each["earlier"]["num_steps"] for each in under_way)
    assert main(["train", "--resume", str(run), "--run.iterations", "6"]) == 0
    assert files(run / "data") == files(whole / "data")


def test_an_evaluation_saves_its_episodes(tmp_path):
    out = tmp_path / "results"
    given = ["eval", "builtin:tiny-oft", "--suite", SUITE, "tabletop_spatial", "--tasks", "1", "3", "--episodes", "3"]
    save = ("--save", "lerobot", "--save-fps", "10", "--save-every", "2", "--save-filter", "successes")
    assert main([*given, "--num-envs", "4", "--device", "cpu", "--out", str(out), *save]) == 0
    episodes = json.loads((out / "results.json").read_text())["episodes"]
    kept = {row["episode_id"]: row for row in episodes[::2] if row["success"]}
    assert 0 < len(kept) < len(episodes[::2]) and {task_of(name).suite for name in kept} == {SUITE}
    assert [path.name for path in (out / "data").iterdir()] == [SUITE], "the other suite has no success"
    found = {each.metadata["file_path"]: each for each in LeRobotDataset(out / "data" / SUITE)}
    assert found.keys() == kept.keys()
    for name, each in found.items():
        assert len(each) == kept[name]["length"]
        np.testing.assert_array_equal(each.values("next.success"), [False] * (len(each) - 1) + [True])
