"""benchmarks/gpu_paths.py on a CPU: what it measures, what it calls wrong, and cases that fail or hang."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_path_cases  # noqa: E402
import gpu_path_ray  # noqa: E402
import gpu_paths  # noqa: E402

from vlarl.weights.sender import WeightSender  # noqa: E402


@pytest.mark.slow
def test_log_probs_are_the_learners_after_each_of_three_syncs(tmp_path):
    result = gpu_path_cases.sync(tmp_path, "cpu", "torch", "object_store")
    assert result["passed"]
    assert [row.get("versions") for row in result["syncs"]] == [None, [1], [2], [3]]
    assert all(0 < row["allowed"] < 1e-3 for row in result["syncs"]), (
        "rounding of float32, not of weights that are stale"
    )


@pytest.mark.slow
def test_weights_that_did_not_arrive_are_noticed(tmp_path, monkeypatch):
    """The engine is given the version of the new weights and none of them but the first."""
    real = WeightSender._send_buckets

    def old_weights(sender, stream, engines, version, staged):
        if version > 1:
            stream = type(stream)(stream.shapes, lambda name: kept[name])
        else:
            kept.update({name: stream.make(name).clone() for name in stream.shapes})
        real(sender, stream, engines, version, staged)

    kept: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(WeightSender, "_send_buckets", old_weights)
    assert not gpu_path_cases.sync(tmp_path, "cpu", "torch", "object_store")["passed"]


@pytest.mark.slow
def test_two_sharded_ranks_make_the_updates_of_one_process(tmp_path):
    result = gpu_path_cases.learners(tmp_path, "cpu", "full")
    assert result["passed"] and "gloo" in result["backend"]
    assert result["weights_differ_by"] <= result["allowed"] < result["an_update_moves_them_by"] / 10


@pytest.mark.slow
def test_a_case_that_fails_or_hangs_is_reported_and_costs_the_others_nothing(tmp_path):
    failed = gpu_paths.run_case("no_such_case", tmp_path, 60.0, toy=True)
    assert failed["state"] == "failed" and "exit code 2" in failed["problem"] and "no_such_case" in failed["output"]
    hung = gpu_paths.run_case("learners", tmp_path, 0.2, toy=True)
    assert hung["state"] == "failed" and "not done after" in hung["problem"]
    shown = gpu_paths.table({"first": failed, "second": hung})
    assert "first" in shown and "second" in shown and "no_such_case" in shown


def test_rows_of_a_run_leave_out_what_the_clock_says(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 0}\n{"iteration": 1, "time/rollout": 2.0, "train/loss": 0.5}\n{"iteration": 2'
    )
    assert gpu_path_ray.trained_rows(tmp_path) == [{"iteration": 1, "train/loss": 0.5}]


@pytest.mark.parametrize("name", gpu_paths.TOY)
def test_the_toy_cases_exist(name):
    assert name in gpu_paths.CASES
