"""The pair of learner and engine: the engine has the learner's version after a sync, and the average in evaluations."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from vlarl.policies.tiny import init_tiny
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.weights.sync import SyncCost, WeightSync


def test_an_engine_that_reports_another_version_after_a_sync_is_refused():
    learner, engine = SimpleNamespace(version=3), SimpleNamespace(version=0)
    with pytest.raises(RuntimeError, match="the engine runs version 0 after a sync to version 3"):
        WeightSync(learner, engine, lambda: None, None).publish()
    WeightSync(learner, engine, lambda: setattr(engine, "version", 3), None).publish()
    assert engine.version == 3


def test_shared_weights_are_not_copied():
    policy = init_tiny("parallel", seed=1)
    engine = TorchEngine(policy, torch.device("cpu"))
    versions = [p._version for p in policy.parameters()]
    WeightSync(SimpleNamespace(version=3), engine, lambda: engine.weights_changed(3), None).publish()
    assert engine.version == 3 and [p._version for p in policy.parameters()] == versions


def test_the_average_is_in_place_for_an_evaluation_alone_and_sent_before_and_after():
    events = []

    class Average:
        @contextmanager
        def in_place(self):
            events.append("average")
            yield
            events.append("newest")

    pair = SimpleNamespace(version=1)
    with WeightSync(pair, pair, lambda: events.append("sent"), Average()).for_evaluation():
        events.append("evaluated")
    assert events == ["average", "sent", "evaluated", "newest", "sent"]
    events.clear()
    with WeightSync(pair, pair, lambda: events.append("sent"), None).for_evaluation():
        events.append("evaluated")
    assert events == ["evaluated"]


def test_what_a_sync_took_is_in_the_row_of_its_iteration():
    pair = SimpleNamespace(version=1)
    cost = SyncCost(seconds=2.5, commit_seconds=0.5, num_bytes=1000, num_resent=3)
    assert WeightSync(pair, pair, lambda: cost, None).publish() == {
        "sync/seconds": 2.5,
        "sync/commit_seconds": 0.5,
        "sync/bytes": 1000.0,
        "sync/resent_buckets": 3.0,
    }
    assert WeightSync(pair, pair, lambda: None, None).publish() == {}, "nothing is copied"
