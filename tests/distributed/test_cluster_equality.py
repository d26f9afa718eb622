"""A run on a cluster is the run of one process: same metrics, same checkpoints, on any number of learners."""

import json

import pytest
from fakes.cluster_runs import SMALL, assert_equal_rows, rows, wait_for

from vlarl.config.source.load import load_config
from vlarl.loop import train

TWO_RANKS = {"distributed.learners_per_node": (2,), "distributed.sharding": "full"}
EVALUATED = {"eval.interval": 3}  # of SMALL, the end of a run alone
IMITATING = {"ptx.path": "experts", "ptx.coef": 0.1, "ptx.batch_size": 5, "ptx.episodes_per_task": 1}
RAY = {"distributed.backend": "ray", "logging.trace": True}


def configured(root, name, **changes):
    return load_config(
        "tabletop_grpo", {**SMALL, **EVALUATED, **IMITATING, "run.root": str(root), "run.name": name, **changes}
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory, ray_here):
    """One process for four iterations; and two ranks for three, which one process resumes for the fourth."""
    root = tmp_path_factory.mktemp("runs")
    train(configured(root, "here", **{"run.iterations": 4}))
    train(configured(root, "there", **RAY, **TWO_RANKS))
    train(configured(root, "there", **{"run.iterations": 4}), resume=root / "there")
    return root


def training_rows(found):
    """Rows of iterations, without evaluations."""
    return [{k: v for k, v in row.items() if not k.startswith("val/")} for row in found if row["iteration"] > 0]


def test_two_ranks_train_as_one_process_does(runs):
    ours, theirs = training_rows(rows(runs / "there"))[:3], training_rows(rows(runs / "here"))[:3]
    assert_equal_rows(ours, theirs)
    assert all(row["train/optimizer_steps"] > 0 for row in ours), "every iteration took optimizer steps"
    assert len({row["train/ptx_loss"] for row in ours}) == 3, "each imitated other samples"


def test_one_process_resumes_from_two_ranks(runs):
    """At the sample that follows, too. Two from one: test_cluster_faults.py."""
    assert_equal_rows(training_rows(rows(runs / "there")), training_rows(rows(runs / "here")))


def test_the_policies_are_evaluated_alike(runs):
    """Before the first iteration, and after the last one of the two ranks."""
    ours, theirs = rows(runs / "there"), rows(runs / "here")
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    after, expected = ({k: row[3][k] for k in row[3] if k.startswith("val/")} for row in (ours, theirs))
    assert expected and after == pytest.approx(expected, abs=1e-5)


def test_the_cluster_is_left_as_it_was_found(runs, ray_here):
    assert ray_here.is_initialized()
    wait_for(lambda: ray_here.available_resources().get("CPU") == 8.0, 60)  # all resources are released


def test_the_timeline_has_a_track_for_each_role(runs):
    events = json.loads((runs / "there" / "trace.json").read_text())
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    expected = {"loop", "learner 0", "learner 1", "engine 0", "environments 0", "environments 1", "curriculum"}
    assert expected <= tracks
    spans = [event["name"] for event in events if event["ph"] == "X"]
    assert {"rollout", "update", "generate", "step", "send_weights", "updating"} <= set(spans)


def test_workers_write_logs_and_report_their_location(runs):
    workers = json.loads((runs / "there" / "logs" / "workers.json").read_text())
    assert {"learner 0", "engine 0", "environments 1"} <= set(workers)
    assert all((runs / "there" / "logs" / f"{name.replace(' ', '-')}.log").exists() for name in workers)
