"""What goes wrong outside: bad input is refused with one message and exit 2 and leaves nothing; a run that fails says so."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlarl.cli import main
from vlarl.envs.tabletop.pool import TabletopPool


def flags(checkpoint: Path | str, root: Path, *extra: str) -> list[str]:
    return [
        "train",
        *("--policy.path", str(checkpoint)),
        *("--run.root", str(root)),
        *("--run.name", "run"),
        *("--run.iterations", "2"),
        *("--run.num_threads", "1"),
        *("--run.device", "cpu"),
        *("--env.task_ids", "0"),
        *("--env.num_envs", "4"),
        *("--rollout.num_groups", "1"),
        *("--rollout.group_size", "2"),
        *("--optim.minibatches", "1"),
        *("--reward.source", "dense"),
        *("--eval.states_per_task", "1"),
        *("--eval.videos", "0"),
        "--no-logging.tensorboard",
        "--no-logging.report",
        *extra,
    ]


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to spoil."""
    return Path(shutil.copytree(checkpoint, tmp_path / "policy"))


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *words: str) -> None:
    """One message of one line with these words, exit 2, and no run directory."""
    root = Path(arguments[arguments.index("--run.root") + 1])
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1, message
    for word in words:
        assert word in message
    assert not (root / "run").exists()


def test_a_missing_checkpoint(capsys, tmp_path):
    refused(
        capsys,
        flags(tmp_path / "nowhere", tmp_path / "runs"),
        "nowhere",
        "there is no folder or run of that name",
        "builtin:",
    )
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_no_checkpoint(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(capsys, flags(tmp_path / "empty", tmp_path / "runs"), "empty", "config.json")


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("model.safetensors", b"", "model.safetensors"),
        ("model.safetensors", b"not weights at all", "model.safetensors"),
        ("model.safetensors", None, "model.safetensors"),
        ("proprio_projector.safetensors", None, "proprio_projector"),
        ("config.json", b"{", "config.json"),
        ("config.json", b"[1]", "config.json"),
        ("config.json", b"{}", "config.json"),
        ("config.json", b'{"timm_model_ids": [], "image_sizes": [], "text_config": null}', "config.json is malformed"),
        ("config.json", b'{"timm_model_ids": [], "image_sizes": [], "text_config": {}}', "vocab_size"),
        ("tokenizer.json", b"{}", "tokenizer.json"),
    ],
)
def test_a_corrupt_checkpoint(capsys, tmp_path, broken, name, content, word):
    (broken / name).unlink()
    if content is not None:
        (broken / name).write_bytes(content)
    refused(capsys, flags(broken, tmp_path / "runs"), str(broken), word)


def test_a_truncated_checkpoint(capsys, tmp_path, broken):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(capsys, flags(broken, tmp_path / "runs"), "model.safetensors", "truncated or corrupt")


def test_weights_that_do_not_fit_the_configuration(capsys, tmp_path, broken):
    tensors = load_file(broken / "model.safetensors")
    tensors["surprise"] = tensors.pop("projector.fc1.bias")
    save_file(tensors, broken / "model.safetensors")
    refused(capsys, flags(broken, tmp_path / "runs"), "missing (1): projector.fc1.bias", "unexpected (1): surprise")


def test_weights_that_are_not_numbers(capsys, tmp_path, broken):
    tensors = load_file(broken / "model.safetensors")
    tensors["projector.fc1.bias"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    refused(
        capsys, flags(broken, tmp_path / "runs"), str(broken), "NaN", "model.projector.fc1.bias", "earlier checkpoint"
    )


def test_a_checkpoint_without_tokenizer(capsys, tmp_path, broken):
    (broken / "tokenizer.json").unlink()
    refused(capsys, flags(broken, tmp_path / "runs"), "policy.path", "tokenizer.json", "copy the tokenizer")


@pytest.mark.parametrize("content", ['{"tabletop": 3}', '{"tabletop": {"proprio": {}}}'])
def test_statistics_that_are_malformed(capsys, tmp_path, broken, content):
    (broken / "dataset_statistics.json").write_text(content)
    refused(capsys, flags(broken, tmp_path / "runs"), "'tabletop' of the checkpoint have no 'action'", "q01 and q99")


def test_statistics_that_are_not_there(capsys, tmp_path, checkpoint):
    refused(capsys, flags(checkpoint, tmp_path, "--policy.unnorm_key", "libero"), "unnorm_key", "'libero'", "tabletop")


def test_a_reward_that_can_not_be_imported(capsys, tmp_path, checkpoint):
    refused(capsys, flags(checkpoint, tmp_path, "--reward.source", "nowhere_at_all:f"), "reward.source", "PYTHONPATH")
    refused(capsys, flags(checkpoint, tmp_path, "--reward.source", "math:sine"), "reward.source", "'sine'")


def test_an_existing_run_is_left_alone(capsys, tmp_path, checkpoint):
    run = tmp_path / "run"
    run.mkdir()
    (run / "precious").write_text("mine")
    assert main(flags(checkpoint, tmp_path)) == 2
    assert "exists already" in (message := capsys.readouterr().err) and "--resume" in message
    assert [path.name for path in run.iterdir()] == ["precious"]


def test_a_root_that_can_not_be_written_to(capsys, tmp_path, checkpoint):
    (tmp_path / "file").write_text("not a folder")
    arguments = flags(checkpoint, tmp_path / "file")
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "cannot write to" in message and "--run.root" in message and message.count("\n") == 1
    assert (tmp_path / "file").read_text() == "not a folder"
    assert main(flags(checkpoint, Path("/proc/vlarl"))) == 2  # even root can't write there
    assert "cannot write to /proc/vlarl" in capsys.readouterr().err


def test_an_extra_that_is_not_installed_leaves_no_run_behind(capsys, tmp_path, checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(
        capsys, flags(checkpoint, tmp_path / "runs", "--logging.wandb"), "pip install -c constraints.txt -e '.[wandb]'"
    )


def test_results_never_go_into_a_folder_that_is_there(capsys, tmp_path, checkpoint):
    """Refused before the checkpoint is loaded."""
    (tmp_path / "results").mkdir()
    assert main(["eval", str(checkpoint), "--out", str(tmp_path / "results")]) == 2
    message = capsys.readouterr().err
    assert "results exists already" in message and message.count("\n") == 1
    assert not list((tmp_path / "results").iterdir())


def test_resuming_what_is_no_run(capsys, tmp_path):
    assert main(["train", "--resume", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_resuming_from_a_damaged_checkpoint_loses_nothing(capsys, tmp_path, checkpoint):
    assert main(flags(checkpoint, tmp_path, "--checkpoint.interval", "1")) == 0
    run = tmp_path / "run"
    metrics, counters = (run / "metrics.jsonl").read_text(), run / "checkpoints" / "final" / "trainer.json"
    intact = counters.read_text()
    impossible = {"tasks": {str(task): {"success": 7.0, "weight": 1.0, "episodes": 1} for task in range(10)}}
    for content in (intact[:20], json.dumps({**json.loads(intact), "sampler": impossible})):
        counters.write_text(content)
        capsys.readouterr()
        assert main(["train", "--resume", str(run), "--run.iterations", "3"]) == 2
        assert "checkpoints/final is damaged" in (message := capsys.readouterr().err) and "move it away" in message
    assert (run / "metrics.jsonl").read_text() == metrics
    shutil.move(run / "checkpoints" / "final", tmp_path / "away")  # what the message advises works
    assert main(["train", "--resume", str(run)]) == 0
    assert [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("file", ["metrics.jsonl", "episodes.jsonl"])
def test_a_full_disk_ends_the_run_with_a_message(capsys, tmp_path, checkpoint, file):
    """The file fills up between two sessions of a run."""
    assert main(flags(checkpoint, tmp_path, "--run.iterations", "1")) == 0
    run = tmp_path / "run"
    capsys.readouterr()

    from vlarl.observability.run_dir import RunDirectory

    kept = RunDirectory.truncate_after
    try:

        def fill(self: RunDirectory, *arguments: int) -> None:
            kept(self, *arguments)
            (run / file).unlink()
            (run / file).symlink_to("/dev/full")

        RunDirectory.truncate_after = fill
        assert main(["train", "--resume", str(run), "--run.iterations", "2"]) == 1
    finally:
        RunDirectory.truncate_after = kept
    message = capsys.readouterr().err
    assert f"{file}: the disk is full (" in message and "MiB free in" in message and "Traceback" not in message
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed" and "the disk is full" in status["message"]
    assert (run / "checkpoints" / "final" / "trainer.json").is_file()


def test_a_policy_that_diverges_fails_with_a_remedy(capsys, tmp_path, checkpoint):
    arguments = flags(checkpoint, tmp_path, "--optim.lr", "1e30", "--run.iterations", "3")
    assert main(arguments) == 1
    message = capsys.readouterr().err
    assert "not finite" in message and "optim.lr" in message and "Traceback" not in message
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_a_second_ctrl_c_stops_at_once(tmp_path, checkpoint):
    """The first asks to stop after the episodes under way; with long ones nobody waits for that."""
    arguments = flags(checkpoint, tmp_path, "--rollout.num_groups", "200", "--rollout.group_size", "8")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_START, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any("stepping" in line for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGINT)
    assert any("noted" in line for line in iter(process.stdout.readline, ""))
    assert process.poll() is None, "the first one only asks"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in errors and "Traceback" not in errors
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "interrupted" and "second Ctrl-C" in status["message"]
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


SLOW_START = """
import sys, time
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.cli import main
from vlarl.interrupt import InterruptGuard

step_chunk, note = TabletopPool.step_chunk, InterruptGuard._note

def slow(self, *arguments):  # the evaluation is over once more than one environment acts
    if len(arguments[0]) > 1:
        print("stepping", flush=True)
        time.sleep(600)
    return step_chunk(self, *arguments)

def noted(self, *arguments):
    note(self, *arguments)
    print("noted", flush=True)

TabletopPool.step_chunk, InterruptGuard._note = slow, noted
sys.exit(main(sys.argv[1:]))
"""


ONLY_STEPS = ["--no-checkpoint.best_return"]


def test_going_back_to_a_checkpoint_repeats_the_run_and_keeps_what_was_there(capsys, tmp_path, checkpoint):
    """Rows are the same bit by bit; later checkpoints are set aside, and the next resume begins at the newest again."""
    assert main(flags(checkpoint, tmp_path, "--run.iterations", "3", "--checkpoint.interval", "1", *ONLY_STEPS)) == 0
    run = tmp_path / "run"
    before = rows(run)
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--from", "step_000001"]) == 0
    output = capsys.readouterr().out
    assert "resuming from checkpoint step_000001, after iteration 1\n" in output
    assert f"set aside, in {run / 'checkpoints' / 'set_aside'}: final, step_000002\n" in output
    assert rows(run) == before
    checkpoints = run / "checkpoints"
    assert sorted(path.name for path in (checkpoints / "set_aside").iterdir()) == ["final", "step_000002"]
    for folder in ("final", "step_000002"):
        ours, theirs = (
            load_file(place / folder / "model.safetensors") for place in (checkpoints, checkpoints / "set_aside")
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert main(["train", "--resume", str(run), "--run.iterations", "4"]) == 0
    assert "resuming from checkpoint final, after iteration 3\n" in capsys.readouterr().out


def rows(run: Path) -> list[dict]:
    """metrics.jsonl without what the clock says."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "perf/", "rollout/collection_time", "rollout/env_steps_per_s")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in found]


def test_an_update_with_absurd_weights_pushes_no_good_checkpoint_out(capsys, tmp_path, checkpoint):
    arguments = ["--checkpoint.interval", "1", "--checkpoint.keep", "1", "--optim.schedule", "constant"]
    assert main(flags(checkpoint, tmp_path, *arguments, "--run.iterations", "2", "--optim.warmup_iterations", "0")) == 0
    run = tmp_path / "run"
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--run.iterations", "4", "--optim.lr", "1e8"]) == 1
    message = capsys.readouterr().err
    assert "the weights are absurd" in message and "not saved" in message and "--from" in message
    kept = json.loads((run / "checkpoints" / "final" / "trainer.json").read_text())
    assert kept["iteration"] == 2 and (run / "checkpoints" / "step_000001").is_dir()
    assert not (run / "checkpoints" / "step_000003").exists()


def test_ctrl_c_in_an_evaluation_is_answered_at_once(capsys, tmp_path, checkpoint, monkeypatch):
    """The first one is answered with a line, and ends the evaluation after the decision under way."""
    step_chunk, calls = TabletopPool.step_chunk, []

    def interrupted(self: TabletopPool, *arguments: Any) -> Any:
        calls.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        for thread in [each for each in threading.enumerate() if each.name == "interrupt"]:
            thread.join(60)
        assert "press Ctrl-C again" in capsys.readouterr().out, "while it steps"
        return step_chunk(self, *arguments)

    monkeypatch.setattr(TabletopPool, "step_chunk", interrupted)
    assert main(flags(checkpoint, tmp_path, "--eval.states_per_task", "4")) == 130
    assert len(calls) == 1 and "interrupted: saving" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "interrupted"
