"""Learners that are lost are started again from the newest checkpoint, and the run ends as if nothing had happened."""

import json
from pathlib import Path

import pytest
import torch
from fakes import lost_rank
from fakes.cluster_runs import SMALL, assert_equal_rows, rows
from safetensors.torch import load_file

from vlarl.config.source.load import load_config
from vlarl.loop import train

pytestmark = pytest.mark.usefixtures("ray_here")
LONGER = SMALL | {"run.iterations": 4, "checkpoint.interval": 2, "optim.minibatches": 2, "rollout.num_groups": 2}
RAY = {"distributed.backend": "ray", "distributed.restarts": 1, "distributed.timeout_s": 60.0}
RAY |= {"distributed.num_env_workers": 1}


def weights(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the final checkpoint's policy."""
    found = sorted((run / "checkpoints" / "final").rglob("*.safetensors"))
    assert found
    return {f"{file.name}/{name}": tensor for file in found for name, tensor in load_file(file).items()}


def test_a_learner_killed_in_an_update_is_started_again_and_the_run_ends_as_the_undisturbed_one(
    tmp_path, monkeypatch, capsys
):
    """It dies in iteration 4, after the first of two steps; the newest checkpoint is of iteration 2."""
    monkeypatch.setattr("vlarl.run.cluster.Rank", lost_rank.LostRank)
    options = {**LONGER, "run.root": str(tmp_path)}
    train(load_config("tabletop_grpo", {**options, **RAY, "run.name": "disturbed"}))
    train(load_config("tabletop_grpo", {**options, "run.name": "calm"}))
    assert (tmp_path / lost_rank.MARK).read_text() == "(1, 2)", "after one optimizer step of two"
    disturbed, calm = tmp_path / "disturbed", tmp_path / "calm"
    assert_equal_rows(rows(disturbed), rows(calm))
    episodes = [
        [json.loads(line)["episode_id"] for line in (run / "episodes.jsonl").read_text().splitlines()]
        for run in (disturbed, calm)
    ]
    assert episodes[0] == episodes[1], "those of iterations 3 and 4 are there once"
    ours, theirs = weights(disturbed), weights(calm)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert json.loads((disturbed / "status.json").read_text())["state"] == "finished"
    shown = capsys.readouterr()
    text = " ".join((shown.out + shown.err).split())
    assert "learner 0 was lost: the learners are started again from the newest checkpoint (restart 1 of 1)" in text
    assert "resuming from checkpoint step_000002, after iteration 2" in text
