"""A supervised run that was killed and resumed equals the undisturbed one, to the bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes.three_schemas import three_schemas
from safetensors.torch import load_file

import vlarl
from vlarl.cli import main
from vlarl.data.batches import DemoBatches
from vlarl.errors import VlarlError
from vlarl.policies.tiny import init_tiny
from vlarl.training.sft import DemoBatch

SAME = "train/loss", "train/grad_norm", "train/skipped_steps", "train/lr"

KILLED = """
import os, signal, sys
from vlarl.cli import main
from vlarl.data.batches import DemoBatches
from vlarl.errors import VlarlError

read = DemoBatches.batch

def batch(self, first, size):
    if first >= 10 * size:  # in the middle of step 11: the newest checkpoint is of step 8, the newest row of step 9
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, first, size)

DemoBatches.batch = batch
main(sys.argv[1:])
"""


def mixture_flags(root: Path, name: str) -> list[str]:
    return [
        "finetune",
        *("--run.root", str(root / "runs"), "--run.name", name, "--run.num_threads", "1", "--run.device", "cpu"),
        *("--policy.path", "init:tiny-oft", "--policy.chunk_length", "2", "--demos.image_size", "28"),
        *("--demos.path", str(root / "data"), "--demos.mapping", str(root / "data" / "mine.yaml")),
        *("--demos.mixture", "bridge_orig:0.5", "viola:0.3", "mine:0.2"),
        *("--optim.steps", "13", "--optim.batch_size", "8", "--optim.warmup_steps", "2"),
        *("--optim.log_interval", "3", "--optim.autocast", "none", "--optim.save_dtype", "float32"),
        *("--checkpoint.interval", "4", "--no-logging.tensorboard"),
        *("--demos.holdout", "0.3", "--validation.interval", "5", "--validation.samples", "6"),
    ]


def lora_flags(root: Path, name: str) -> list[str]:
    return [
        "finetune",
        *("--run.root", str(root / "runs"), "--run.name", name, "--run.num_threads", "1", "--run.device", "cpu"),
        *("--policy.path", str(root / "base"), "--lora.enabled", "--lora.rank", "4", "--lora.dropout", "0.2"),
        *("--demos.suites", "tabletop_spatial", "--demos.episodes_per_task", "1", "--demos.num_workers", "1"),
        *("--demos.task_ids", "0", "--optim.steps", "7", "--optim.batch_size", "6", "--optim.microbatch_size", "4"),
        *("--optim.warmup_steps", "1", "--optim.log_interval", "2", "--optim.autocast", "none", "--optim.lr", "1e-2"),
        *("--checkpoint.interval", "100", "--no-logging.tensorboard", "--no-logging.report"),
        "--augment.enabled",
    ]


def rows(run: Path) -> list[dict]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: row[name] for name in row if name in SAME or name.startswith(("data/", "iter", "val/"))} for row in found
    ]


def assert_equal_runs(one: Path, two: Path) -> None:
    assert rows(one) == rows(two)
    checkpoints = sorted(path.name for path in (one / "checkpoints").iterdir())
    assert checkpoints == sorted(path.name for path in (two / "checkpoints").iterdir())
    for name in checkpoints:
        files = sorted((one / "checkpoints" / name).glob("*.safetensors"))
        assert files
        for file in files:
            ours, theirs = load_file(file), load_file(two / "checkpoints" / name / file.name)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours), file
    last = next(name for name in checkpoints if name.startswith("step_"))
    counters = [json.loads((run / "checkpoints" / last / "trainer.json").read_text()) for run in (one, two)]
    assert counters[0] == counters[1]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a mixture that was killed, and resumed, and the same one undisturbed."""
    root = tmp_path_factory.mktemp("killed")
    three_schemas(root / "data")
    assert main(mixture_flags(root, "whole")) == 0
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *mixture_flags(root, "killed")], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = root / "runs" / "killed"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step_000008", "best_validation"}
    assert [row["iteration"] for row in rows(run)] == [3, 5, 6, 9, 10]
    assert ["val/l1" in row for row in rows(run)] == [False, True, False, False, True]
    return root


def test_a_killed_run_on_a_mixture_resumes_to_the_bit(killed, capsys):
    run = killed / "runs" / "killed"
    assert main(["finetune", "--resume", str(run)]) == 0
    assert "resuming from checkpoint step_000008, after step 8" in capsys.readouterr().out
    assert_equal_runs(killed / "runs" / "whole", run)
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["iteration"], status["iterations"]) == ("finished", 13, 13)
    assert status["resume"].startswith("vlarl finetune --resume")
    assert (run / "report.html").is_file()


def test_a_run_that_is_finished_is_left_alone(killed, capsys):
    whole = killed / "runs" / "whole"
    before = (whole / "checkpoints" / "final" / "model.safetensors").stat().st_mtime_ns
    assert main(["finetune", "--resume", str(whole)]) == 0
    assert "it is finished. To train longer: vlarl finetune --resume" in capsys.readouterr().out
    assert main(["finetune", "--resume", str(whole), "--optim.lr", "1e-4"]) == 2
    assert "nothing is left to do" in capsys.readouterr().err
    assert (whole / "checkpoints" / "final" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--optim.batch_size", "4"], "a resumed run keeps its batch_size, 8"),
        (["--demos.holdout", "0.5"], "a resumed run keeps its holdout, 0.3"),
        (["--run.seed", "1"], "a resumed run keeps its seed, 0"),
        (["--from", "step_000009"], "has no checkpoint of that name to resume from"),
    ],
)
def test_what_would_make_another_run_of_it_is_refused(killed, capsys, flags, words):
    assert main(["finetune", "--resume", str(killed / "runs" / "whole"), *flags]) == 2
    assert words in capsys.readouterr().err


def test_each_command_names_the_other_for_its_runs(killed, capsys):
    assert main(["train", "--resume", str(killed / "runs" / "whole")]) == 2
    assert "is a run of `vlarl finetune`: resume it with `vlarl finetune --resume" in capsys.readouterr().err


def test_other_demonstrations_are_refused(killed, capsys, tmp_path):
    """Which frame a sample is follows from their number."""
    run = killed / "runs" / "whole"
    counters = run / "checkpoints" / "step_000013" / "trainer.json"
    saved = counters.read_text()
    before = (run / "config.yaml").read_text(), (run / "status.json").read_text()
    changed = json.loads(saved)
    changed["frames"]["viola"] += 1
    try:
        counters.write_text(json.dumps(changed))
        assert main(["finetune", "--resume", str(run), "--optim.steps", "20"]) == 2
    finally:
        counters.write_text(saved)
    assert before == ((run / "config.yaml").read_text(), (run / "status.json").read_text()), "it was only refused"
    message = capsys.readouterr().err
    assert "the demonstrations have changed" in message and "frames of viola" in message


def test_ctrl_c_saves_and_adapters_with_dropout_resume_to_the_bit(tmp_path, monkeypatch, capsys):
    """Dropout is sampled by torch's generator, whose state the checkpoint has."""
    init_tiny("parallel", seed=1, chunk_length=4).save(tmp_path / "base")
    assert main(lora_flags(tmp_path, "whole")) == 0
    read = DemoBatches.batch

    def batch(self: DemoBatches, first: int, size: int) -> DemoBatch:
        if first == 2 * size:
            os.kill(os.getpid(), signal.SIGINT)
        return read(self, first, size)

    with monkeypatch.context() as patch:
        patch.setattr(DemoBatches, "batch", batch)
        capsys.readouterr()
        assert main(lora_flags(tmp_path, "stopped")) == 130
    run = tmp_path / "runs" / "stopped"
    assert "interrupted and saved; resume with: vlarl finetune --resume" in capsys.readouterr().out
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000003"]
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"
    summary = vlarl.finetune(resume=run)
    assert summary.checkpoint == run / "checkpoints" / "final"
    assert_equal_runs(tmp_path / "runs" / "whole", run)


def test_an_earlier_checkpoint_leads_to_the_same_run(killed, capsys):
    """Later ones are set aside, the best one of later steps and the final one, too."""
    assert main([*mixture_flags(killed, "again"), "--checkpoint.keep", "9"]) == 0
    run = killed / "runs" / "again"
    assert main(["finetune", "--resume", str(run), "--from", "step_000004"]) == 0
    checkpoints = run / "checkpoints"
    aside = {path.name for path in (checkpoints / "set_aside").iterdir()}
    assert aside == {"step_000008", "step_000012", "step_000013", "best_validation", "final"}
    assert "resuming from checkpoint step_000004, after step 4" in capsys.readouterr().out
    assert rows(run) == rows(killed / "runs" / "whole")
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (checkpoints / "final", checkpoints / "set_aside" / "final")
    )
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("failing", "remedy"),
    [
        (
            7,
            "The newest checkpoint is of step 4, in {run}/checkpoints: resume from it with `vlarl finetune --resume {run}`",
        ),
        (2, "There is no checkpoint yet: `vlarl finetune --resume {run}` starts again at step 1."),
    ],
)
def test_a_run_that_fails_says_how_it_resumes(killed, monkeypatch, capsys, failing, remedy):
    read = DemoBatches.batch

    def batch(self: DemoBatches, first: int, size: int) -> DemoBatch:
        if first == (failing - 1) * size:
            raise VlarlError("the disk is gone")
        return read(self, first, size)

    run = killed / "runs" / f"failed{failing}"
    with monkeypatch.context() as patch:
        patch.setattr(DemoBatches, "batch", batch)
        assert main(mixture_flags(killed, run.name)) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: the disk is gone") and remedy.format(run=run) in message
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed" and "the disk is gone" in status["message"]
    assert main(["finetune", "--resume", str(run)]) == 0
    assert_equal_runs(killed / "runs" / "whole", run)
