"""`vlarl bench rollout|update|sync|iteration` on the built-in models, on a CPU."""

import json
import threading
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from vlarl.bench import sync
from vlarl.bench.busy import on_gpu, union
from vlarl.bench.replica import ProcessReplica, serve
from vlarl.bench.request import Bench, BenchRequest
from vlarl.bench.results import Report, Row
from vlarl.bench.rollout import finite
from vlarl.bench.timing import Rates, Timing, timed
from vlarl.cli import main
from vlarl.errors import VlarlError

CPU = torch.device("cpu")
ROW_FIELDS = {
    *("what", "count", "vlarl", "peer", "peer_over_vlarl", "floor_s", "floor_over_median", "agreement", "facts"),
    "error",
}
TIMING_FIELDS = {
    *("median_s", "first_quartile_s", "third_quartile_s", "min_s", "max_s", "repeats", "per_s", "peak_gib"),
}


def measured(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, "--repeats", "2", "--device", "cpu", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(report) == {"command", "machine", "settings", "rates", "rows", "notes"}
    assert report["command"] == arguments[0]
    assert report["rates"]["flops_per_s"] > 1e9 and report["rates"]["bytes_per_s"] > 1e8
    for row in report["rows"]:
        assert set(row) == ROW_FIELDS and row["error"] is None
        assert set(row["vlarl"]) == TIMING_FIELDS and row["vlarl"]["repeats"] == 2
        assert row["vlarl"]["per_s"] == pytest.approx(row["count"] / row["vlarl"]["median_s"])
    return report


def test_rollout_beside_transformers(capsys, tmp_path):
    out = tmp_path / "rollout.json"
    options = ("--model", "builtin:tiny-openvla", "--rows", "2", "--rank", "4", "--out", str(out))
    report = measured(capsys, "rollout", *options)
    whole, prefill, adapted, _ = report["rows"]
    assert whole["what"] == "7-token action, batch 2" and prefill["what"] == "prefill alone, batch 2"
    assert whole["facts"] == {"equal_tokens": 1.0, "equal_tokens_float32": 1.0}
    assert whole["peer"]["name"] == "transformers" and adapted["peer"] is None
    assert whole["peer_over_vlarl"] == whole["peer"]["median_s"] / whole["vlarl"]["median_s"]
    assert 0 < prefill["floor_s"] < whole["floor_s"] < adapted["floor_s"]
    assert json.loads(out.read_text(encoding="utf-8")) == report


def test_update_beside_peft(capsys):
    report = measured(capsys, "update", "--model", "init:tiny-oft", "--microbatch", "4", "--rank", "4")
    (row,) = report["rows"]
    assert row["count"] == 8 and row["peer"]["name"] == "peft"
    assert row["facts"]["logprob_difference"] < 1e-4
    assert row["floor_over_median"] == row["floor_s"] / row["vlarl"]["median_s"]


def test_iteration_adds_up(capsys):
    options = ("--model", "init:tiny-oft", "--decisions", "4", "--rows", "2", "--microbatch", "3", "--rank", "4")
    whole, *parts = measured(capsys, "iteration", *options)["rows"]
    assert [part["what"] for part in parts] == ["rollout", "update", "rest"]
    assert whole["vlarl"]["median_s"] == pytest.approx(sum(part["vlarl"]["median_s"] for part in parts))
    assert whole["floor_s"] == parts[0]["floor_s"] + parts[1]["floor_s"]
    assert whole["facts"] == {"gpu_busy": None}  # a CPU has no kernels that could be counted


def threaded_replica(request: BenchRequest, *, adapters: bool) -> ProcessReplica:
    """The replica's program in a thread: a process takes seconds to import torch."""
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs, request, adapters))
    thread.start()
    return ProcessReplica(ours, thread.join)


def test_sync_sends_adapters_and_the_replica_acts_with_them(capsys, monkeypatch):
    monkeypatch.setattr(sync, "start_replica", threaded_replica)
    options = ("--model", "init:tiny-oft", "--rank", "4", "--bucket-mb", "1", "--adapters")
    here, there = measured(capsys, "sync", *options)["rows"]
    assert here["facts"]["bytes"] == 0 and here["facts"]["bytes_of_all_weights"] > 4 * 4e6
    assert there["facts"]["equal_tokens"] == 1.0 and there["facts"]["buckets"] == 1
    assert 0 < there["facts"]["bytes"] < 1e6  # two matrices of rank 4 for each linear layer, in float32


def test_an_error_of_the_replica_is_raised_here():
    with pytest.raises(VlarlError, match="the replica engine: .*nothing-of-that-name"):
        threaded_replica(BenchRequest("nothing-of-that-name", device="cpu"), adapters=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout", "--adapters", "--peers"], "--peers: `vlarl bench rollout --adapters` has no peer"),
        (["update", "--no-adapters", "--peers"], "--peers: `vlarl bench update --no-adapters` has no peer"),
        (["sync", "--no-adapters", "--rank", "4"], "--rank is for adapters, and --no-adapters leaves them out"),
        (["rollout", "--device", "cpu", "--memory-gb", "8"], "--memory-gb limits a GPU's memory"),
        (["iteration", "--decisions", "10", "--rows", "4"], "--decisions 10 --rows 4: the decisions must divide"),
        (["iteration", "--decisions", "4", "--rows", "1"], "--decisions 4 --rows 1: the decisions must divide"),
        (["rollout", "--model", "init:tiny-smolvla"], "vlarl bench does not measure SmolVLAPolicy"),
        (["rollout", "--out", "nowhere/x.json"], "--out nowhere/x.json: there is no directory nowhere"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_refused(capsys, arguments, message):
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_row_that_does_not_fit_says_so():
    def measure() -> Row:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has less.")

    bench = Bench(BenchRequest("builtin:tiny-oft", device="cpu"), measured=False)
    row = bench.attempt("batch 64", 64, measure)
    assert row.error == "out of memory: CUDA out of memory" and row.to_json()["vlarl"] is None
    fits = Row("batch 1", 1, Timing((0.5, 1.0, 1.5), None), floor_s=0.25)
    report = Report("rollout", {"model": "m", "dtype": "float32", "device": "cpu"}, Rates(2e12, 3e9), [fits, row])
    first, header, fitting, failed = report.lines()
    assert first == "rollout of m, float32, on cpu; matrix product 2 TFLOP/s, memory 3 GB/s"
    assert header.split("  ")[0] == "what" and "peer ms" not in header
    assert fitting.split() == ["batch", "1", "1000", "750-1250", "1.0", "250", "0.25"]
    assert failed == "batch 64  out of memory: CUDA out of memory"


def test_quartiles_and_median():
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0), None)
    assert timing.median == 3.0 and timing.quartiles == (2.0, 4.0)
    assert Timing((7.0,), None).quartiles == (7.0, 7.0)


def test_repeats_follow_the_warmups_and_take_other_inputs():
    calls: list[tuple[str, int]] = []
    timing = timed(lambda i: calls.append(("work", i)), 2, 1, CPU, lambda i: calls.append(("prepare", i)))
    assert len(timing.seconds) == 2 and timing.peak_bytes is None
    assert calls == [(name, i) for i in range(3) for name in ("prepare", "work")]


def test_kernels_that_overlap_count_once():
    assert union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0
    assert union([]) == 0.0


def test_only_kernels_count_in_a_trace():
    with profile(activities=[ProfilerActivity.CPU]) as trace, record_function("an annotation"):
        torch.ones(8).sum()
    events = list(trace.events())
    assert len(events) > 1 and on_gpu(events) == 0.0
    for event in events:  # as on a GPU: whatever is inside of the annotation is a kernel
        event.device_type = DeviceType.CUDA
    kernels = [event for event in events if event.name != "an annotation"]
    assert 0.0 < on_gpu(kernels) == on_gpu(events)


def test_values_that_are_not_finite_are_not_timed():
    with pytest.raises(VlarlError, match="is not finite"):
        finite(torch.tensor([1.0, float("nan")]))
