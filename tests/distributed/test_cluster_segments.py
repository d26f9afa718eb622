"""Segments on a cluster are those of one process."""

import json

from fakes.cluster_runs import SMALL, assert_equal_rows, rows

from vlarl.config.source.load import load_config
from vlarl.loop import train

SEGMENTS = {
    "rollout.num_steps": 10,
    "rollout.group_size": 1,
    "env.num_envs": 4,
    "env.lockstep": True,
    "run.iterations": 3,
    "eval.interval": 2,
    "algorithm.critic_hidden": (16,),
    "algorithm.value_init_steps": 0,
}
RAY = {"distributed.backend": "ray", "distributed.num_env_workers": 2, "distributed.worker_cpus": 0.1}


def configured(root, name, **changes):
    small = {path: value for path, value in SMALL.items() if path != "rollout.num_groups"}
    return load_config("tabletop_ppo", {**small, **SEGMENTS, "run.root": str(root), "run.name": name, **changes})


def test_segments_over_ray_are_those_of_one_process_and_resume_there(ray_here, tmp_path):
    """Three iterations here; there two, and after a resume the third, with one worker of environments."""
    train(configured(tmp_path, "here"))
    train(configured(tmp_path, "there", **RAY, **{"run.iterations": 2}))
    train(configured(tmp_path, "there", **RAY | {"distributed.num_env_workers": 1}), resume=tmp_path / "there")
    ours, theirs = rows(tmp_path / "there")[1:], rows(tmp_path / "here")[1:]
    assert_equal_rows(
        *([{k: v for k, v in row.items() if not k.startswith("val/")} for row in r] for r in (ours, theirs))
    )
    left = [
        json.loads((tmp_path / name / "checkpoints" / "final" / "trainer.json").read_text())["open_episodes"]
        for name in ("here", "there")
    ]
    assert len(left[0]["episodes"]) > 0
    assert [e["actions"] for e in left[0]["episodes"]] == [e["actions"] for e in left[1]["episodes"]]
    assert left[0] == left[1], "the same episodes are under way, to the bit"
