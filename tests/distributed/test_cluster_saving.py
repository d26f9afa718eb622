"""Episodes that are saved by a run on a cluster are those of one process, to the byte."""

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


def test_the_same_episodes_are_saved(tmp_path):
    """Frames stay in the stores of the environments' machines, and those of failures and of other episodes are never
    read."""
    train(configured(tmp_path, "here"))
    train(configured(tmp_path, "there", **RAY))
    assert_equal_rows(rows(tmp_path / "there")[1:], rows(tmp_path / "here")[1:])
    ours, theirs = (files(tmp_path / name / "data") for name in ("there", "here"))
    assert ours == theirs
    (suite,) = (tmp_path / "here" / "data").iterdir()
    assert 0 < len(RldsDataset(suite)) < 6
