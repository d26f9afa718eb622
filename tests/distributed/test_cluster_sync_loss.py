"""An engine is lost after an update, in the middle of the sync that follows: its replacement has the new weights."""

import json
from functools import partial

import pytest
import torch
from fakes import lost_engine
from fakes.adapter_movement import adapter_rounding
from fakes.cluster_runs import SMALL, assert_equal_rows, rows
from fakes.float_error import check_logprobs

from vlarl.config.source.load import load_config
from vlarl.decisions import Sampling
from vlarl.distributed.cluster import Cluster, wait_started
from vlarl.distributed.demand import Resources
from vlarl.distributed.engines import EngineGroup
from vlarl.distributed.learners import LearnerGroup, Rank
from vlarl.loop import train
from vlarl.observability.trace import NoTrace
from vlarl.policies.load import load_acting_policy
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.prepare import load_trained_policy

pytestmark = pytest.mark.usefixtures("ray_here")
CPU = torch.device("cpu")
RAY = {"distributed.backend": "ray", "distributed.sync_bucket_mb": 1, "distributed.timeout_s": 60.0}
RAY |= {"distributed.num_env_workers": 1}


def test_the_run_equals_the_undisturbed_one(tmp_path, monkeypatch):
    monkeypatch.setattr("vlarl.run.cluster.build_torch_engine", lost_engine.build)
    options = {**SMALL, "run.root": str(tmp_path)}
    train(load_config("tabletop_grpo", {**options, **RAY, "run.name": "disturbed"}))
    train(load_config("tabletop_grpo", {**options, "run.name": "calm"}))
    assert (tmp_path / lost_engine.MARK).exists(), "the engine died after the second update"
    log = (tmp_path / "disturbed" / "logs" / "train.log").read_text()
    assert log.count("engine 0 was lost in a sync. It is replaced.") == 1
    check_sync_metrics(tmp_path)
    ours, theirs = rows(tmp_path / "disturbed"), rows(tmp_path / "calm")
    assert [row["train/optimizer_steps"] > 0 for row in ours if row["iteration"]] == [True] * 3
    assert_equal_rows(ours, theirs)  # train/engine_logprob_error of iteration 3 too: the replacement and the learner


def check_sync_metrics(root):
    """Each iteration of the cluster's run has what its sync took; that of one process copies nothing."""
    disturbed, calm = (
        [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("disturbed", "calm")
    )
    trained = load_trained_policy(load_config("tabletop_grpo", SMALL), None, CPU)
    whole = sum(parameter.nbytes for parameter in trained.parameters() if parameter.requires_grad)
    assert not any(name.startswith("sync/") for row in calm for name in row)
    assert "sync/bytes" not in disturbed[0], "nothing was trained before the first evaluation"
    first, second, third = (row["sync/bytes"] for row in disturbed[1:])
    assert first == third == whole and whole < second < 2 * whole, "a part was sent in vain to the engine that died"
    for row in disturbed[1:]:
        assert 0 < row["sync/commit_seconds"] <= row["sync/seconds"] and row["sync/resent_buckets"] == 0


class TrainedRank(Rank):
    """Takes optimizer steps without a batch of episodes."""

    def step(self, inputs, tokens):
        policy = self.learner.policy
        optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-4)
        adapter_rounding.train(policy, optimizer, inputs, tokens, steps=2)
        self.learner.version = lost_engine.FATAL_VERSION
        return {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}


def test_the_replacement_has_the_log_probs_of_the_trained_weights(tmp_path, observation):
    options = {**SMALL, **RAY, "policy.path": "builtin:tiny-openvla", "run.root": str(tmp_path)}
    config = load_config("tabletop_grpo", options)
    cluster = Cluster(config.distributed, tmp_path / "logs", 1, NoTrace())
    try:
        nothing = Resources(0.0, 0.0)
        learner = cluster.worker("learner 0", partial(TrainedRank, config, 1, False, 0), nothing)
        engine = cluster.worker("engine 0", partial(lost_engine.build, config, False), nothing)
        wait_started([learner, engine])
        policy = load_acting_policy(config, None, CPU)
        group, engines = LearnerGroup([learner], config, policy), EngineGroup([engine])
        group.join(None)
        group.send_weights(engines)
        inputs, seeds = policy.process([observation(i) for i in range(4)]), [1, 2, 3, 4]
        before, first = engines.generate(inputs, Sampling(1.0), seeds), engine.location.pid
        weights = group.call_all("step", inputs, before.sample.ids)
        group.send_weights(engines)
        assert engine.location.pid != first and (tmp_path / lost_engine.MARK).exists()
        after = engines.generate(inputs, Sampling(1.0), seeds)
        assert after.version.tolist() == [lost_engine.FATAL_VERSION] * 4
        with pytest.raises(AssertionError):
            check_logprobs(after.engine_logprobs, policy, inputs, after.sample.ids, 1.0)  # the weights have moved
        policy.load_state_dict(weights)
        policy.weights_changed()
        check_logprobs(after.engine_logprobs, policy, inputs, after.sample.ids, 1.0)
        same = TorchEngine(policy, CPU).generate(inputs, Sampling(1.0), seeds)
        torch.testing.assert_close(after.sample.ids, same.sample.ids)
    finally:
        cluster.close()
