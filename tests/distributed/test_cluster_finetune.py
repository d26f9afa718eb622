"""`vlarl finetune` on two ranks of a Ray cluster trains what one process trains, also if it is stopped or loses one."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from fakes import lost_rank
from fakes.three_schemas import three_schemas
from safetensors.torch import load_file

from vlarl.cli import main
from vlarl.config.finetune import FinetuneConfig
from vlarl.distributed.finetune import FinetuneRank, RankTrainers

pytestmark = pytest.mark.usefixtures("ray_here")
TIMED = ("time", "perf/")


def flags(root: Path, name: str) -> list[str]:
    return [
        "finetune",
        *("--run.root", str(root / "runs"), "--run.name", name, "--run.num_threads", "1", "--run.device", "cpu"),
        *("--policy.path", "init:tiny-oft", "--policy.chunk_length", "2", "--demos.image_size", "28"),
        *("--demos.suites", "tabletop_spatial", "--demos.task_ids", "0", "1", "--demos.episodes_per_task", "3"),
        *("--demos.num_workers", "1", "--demos.holdout", "0.3", "--validation.samples", "5"),
        *("--optim.steps", "6", "--optim.batch_size", "8", "--optim.warmup_steps", "2", "--optim.log_interval", "1"),
        *("--optim.autocast", "none", "--optim.save_dtype", "float32", "--optim.microbatch_size", "4"),
        *("--checkpoint.interval", "3", "--validation.interval", "3", "--no-logging.tensorboard"),
    ]


def rows(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith(TIMED)} for line in lines]


def test_a_rank_reads_recorded_episodes_itself(tmp_path):
    three_schemas(tmp_path / "data")
    demos = {"path": str(tmp_path / "data" / "mine"), "mapping": str(tmp_path / "data" / "mine.yaml"), "image_size": 28}
    config = FinetuneConfig.model_validate(
        {"demos": demos, "optim": {"steps": 2, "batch_size": 4, "warmup_steps": 0, "log_interval": 1}}
    )
    rank = FinetuneRank(config, 1, False, 0)
    rank.join("", 0)
    trained_on, lines, state = rank.open(None, tmp_path)
    assert trained_on.names == ("mine",) and any("mine: 24 frames" in line for line in lines) and state.iteration == 0
    row, state = rank.step()
    assert row["train/loss"] > 0 and state.iteration == 1


def test_ranks_that_are_stopped_and_lost_train_what_one_process_trains(tmp_path, monkeypatch, capsys):
    assert main(flags(tmp_path, "alone")) == 0
    run, step = tmp_path / "runs" / "ranks", RankTrainers.step

    def stopped(self: RankTrainers) -> dict[str, float] | None:
        if self.state.iteration == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(RankTrainers, "step", stopped)
        ranks = ["--distributed.backend", "ray", "--distributed.learners_per_node", "2"]
        assert main([*flags(tmp_path, "ranks"), *ranks]) == 130
    shown = capsys.readouterr().out
    assert "device those of a Ray cluster" in shown and "tabletop: validated on" in shown
    assert "interrupted and saved; resume with: vlarl finetune --resume" in shown
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]

    with monkeypatch.context() as patch:
        patch.setattr("vlarl.run.finetune_cluster.FinetuneRank", lost_rank.LostFinetuneRank)
        assert main(["finetune", "--resume", str(run)]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "learner 1" in shown and "died (killed, out of memory, or crashed)" in shown
    assert "The newest checkpoint is of step 3" in shown and f"`vlarl finetune --resume {run}`" in shown
    assert json.loads((run / "status.json").read_text())["state"] == "failed"

    here = ["--distributed.backend", "local", "--distributed.learners_per_node", "1"]
    assert main(["finetune", "--resume", str(run), *here]) == 0
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    alone = tmp_path / "runs" / "alone"
    assert rows(run) == rows(alone) and len(rows(run)) == 6 and "val/l1" in rows(run)[2]
    for name in ("final", "best_validation", "step_000006"):
        ours, theirs = (load_file(one / "checkpoints" / name / "model.safetensors") for one in (run, alone))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    workers = json.loads((run / "logs" / "workers.json").read_text())
    assert workers.keys() == {"learner 0", "learner 1"}
