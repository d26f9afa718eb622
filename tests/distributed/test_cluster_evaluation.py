"""`vlarl eval` on a cluster: the same episodes with the same results as in one process."""

import json

from fakes.cluster_runs import wait_for

from vlarl.cli import main


def evaluated(folder, *arguments: str) -> dict:
    assert main(["eval", *arguments, "--device", "cpu", "--env.lockstep", "--out", str(folder)]) == 0
    return json.loads((folder / "results.json").read_text())


def test_episodes_and_results_are_those_of_one_process(ray_here, tmp_path):
    """Of two suites at once, sampled, on two engines and three environment workers."""
    few = ("--tasks", "1", "4", "--episodes", "3", "--num-envs", "8", "--temperature", "0.7", "--seed", "3")
    given = ("builtin:tiny-oft", "--suite", "tabletop_spatial", "tabletop_object", *few)
    here = evaluated(tmp_path / "here", *given)
    workers = ("--distributed.torch_num_engines", "2", "--distributed.num_env_workers", "3")
    there = evaluated(tmp_path / "there", *given, "--distributed.backend", "ray", *workers)
    assert len(here["episodes"]) == 12 and there["complete"]
    assert there["episodes"] == here["episodes"] and there["totals"] == here["totals"]
    outcomes = {(episode["success"], episode["length"]) for episode in here["episodes"]}
    assert len(outcomes) > 2, "episodes that all end alike would show nothing"
    logs = {path.name for path in (tmp_path / "there" / "logs").glob("*.log")}
    assert logs >= {"engine-0.log", "engine-1.log", "environments-2.log"}
    assert not [name for name in logs if "learner" in name or "curriculum" in name]
    wait_for(lambda: ray_here.available_resources().get("CPU") == 8.0, 30)


def test_vllm_evaluates_as_torch_does(ray_here, tmp_path):
    few = ("--suite", "tabletop_object", "--tasks", "0", "4", "--episodes", "2", "--num-envs", "4")
    here = evaluated(tmp_path / "here", "builtin:tiny-openvla", *few)
    engine = ("--vllm.num_engines", "1", "--vllm.enforce_eager", "--vllm.max_num_seqs", "4")
    there = evaluated(tmp_path / "there", "builtin:tiny-openvla", *few, "--distributed.backend", "ray", *engine)
    assert there["episodes"] == here["episodes"]
