"""Episodes that are saved by a run on a cluster are those of one process, to the byte."""

import json
from pathlib import Path

from fakes.cluster_runs import SMALL, assert_equal_rows, rows

from vlarl.config.source.load import load_config
from vlarl.data.rlds.reader import RldsDataset
from vlarl.loop import train

SAVING = {"run.iterations": 1, "rollout.save": "rlds", "rollout.save_every": 3, "rollout.save_filter": "successes"}
RAY = {"distributed.backend": "ray", "distributed.num_env_workers": 2, "distributed.worker_cpus": 0.1}


def configured(root: Path, name: str, **changes):
    return load_config("tabletop_grpo", {**SMALL, **SAVING, "run.root": str(root), "run.name": name, **changes})


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_episodes_are_saved(ray_here, tmp_path):
    """Frames stay in the stores of the environments' machines, and those of failures and of other episodes are never
    read."""
    train(configured(tmp_path, "here"))
    train(configured(tmp_path, "there", **RAY))
    assert_equal_rows(rows(tmp_path / "there")[1:], rows(tmp_path / "here")[1:])
    ours, theirs = (files(tmp_path / name / "data") for name in ("there", "here"))
    assert ours == theirs
    (suite,) = (tmp_path / "here" / "data").iterdir()
    assert 0 < len(RldsDataset(suite)) < 6


def test_rollouts_ahead_of_the_update_save_the_episodes_that_are_reported(ray_here, tmp_path):
    """An episode may end before the iteration that it counts in begins."""
    ahead = {"distributed.asynchronous": True, "distributed.max_staleness": 1, "env.lockstep": False}
    every = {"run.iterations": 2, "rollout.save_every": 1, "rollout.save_filter": "all", "rollout.videos": 1}
    train(configured(tmp_path, "run", **RAY | ahead | every | {"distributed.num_env_workers": 1}))
    lines = (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()
    reported = [row["episode_id"] for row in map(json.loads, lines) if row["phase"] == "rollout"]
    (suite,) = (tmp_path / "run" / "data").iterdir()
    assert [each.texts("episode_metadata/file_path")[0] for each in RldsDataset(suite)] == reported
    assert len(reported) >= 32 and list((tmp_path / "run" / "videos").glob("rollout_*.mp4"))
