"""Ray, two FSDP2 ranks, a vLLM engine and two environment workers train the tabletop. A missing vllm is a failure."""

import math
import os
import signal

import pytest
from fakes.cluster_runs import SMALL, ClusterRun, flags, rounding, rows
from fakes.float_error import LOGPROB_FACTOR

from vlarl.config.source.load import load_config
from vlarl.loop import train

LEARNS = SMALL | {
    "policy.path": "builtin:tiny-openvla",
    "run.iterations": 6,
    "env.task_ids": (0,),
    "env.num_envs": 16,
    "rollout.num_groups": 16,
    "rollout.group_size": 1,
    "rollout.temperature": 1.6,
    "optim.lr": 1e-4,
    "optim.minibatches": 2,
    "eval.states_per_task": 20,
}
CLUSTER = LEARNS | {
    "env.lockstep": False,
    "distributed.learners_per_node": (2,),
    "distributed.sharding": "full",
    "distributed.num_env_workers": 2,
    "distributed.sync_checksum": True,
    "vllm.num_engines": 1,
    "vllm.enforce_eager": True,
    "vllm.max_num_seqs": 16,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run on a cluster, whose engine is killed once, and the same training in one process."""
    root = tmp_path_factory.mktemp("runs")
    there = ClusterRun(root, "there", "tabletop_ppo_openvla", *flags(CLUSTER))
    train(load_config("tabletop_ppo_openvla", {**LEARNS, "run.root": str(root), "run.name": "here"}))
    there.wait_rows(3)
    os.kill(there.pid_of("engine 0"), signal.SIGKILL)
    code, output = there.end()
    assert code == 0, output
    return root, there


def test_engine_and_learners_agree_after_every_sync(runs):
    root, _ = runs
    updates = [row for row in rows(root / "there") if row["iteration"] > 0]
    assert len(updates) == 6
    judge = rounding(LEARNS["policy.path"], LEARNS["rollout.temperature"])
    for row in updates:  # k3 of two close log-probs is half the square of their difference
        root_mean_square = math.sqrt(2 * abs(row["train/engine_mismatch_kl"]))
        assert root_mean_square <= LOGPROB_FACTOR * judge.rms
        assert row["train/engine_logprob_error"] <= judge.apart(LOGPROB_FACTOR), "the worst of thousands of tokens"
        assert row["train/ratio_first_minibatch_error"] == 0.0


def test_it_trains_as_well_as_one_process(runs):
    root, _ = runs
    success = {
        name: [r["val/success_rate"] for r in rows(root / name) if "val/success_rate" in r]
        for name in ("here", "there")
    }
    assert success["here"][0] == pytest.approx(success["there"][0], abs=0.051), "the same policy to start with"
    assert success["here"][0] <= 0.25 and success["here"][-1] >= 0.6
    assert success["there"][-1] >= 0.6 and abs(success["there"][-1] - success["here"][-1]) <= 0.3


def test_a_killed_engine_is_replaced_and_brought_to_the_weights(runs):
    root, there = runs
    log = (root / "there" / "logs" / "train.log").read_text()
    assert "engine 0" in log and "It is replaced" in log
    assert there.left_running() == []
