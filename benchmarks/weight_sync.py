"""Time and memory of weight syncs, of all weights and of LoRA adapters. Prints a table, or JSON.

    python benchmarks/weight_sync.py [--hidden 1024] [--layers 12] [--bucket-mb 64] [--engines torch vllm] [--json]
    python benchmarks/weight_sync.py --quick        # a model of 60 MB, torch engine: seconds, for CI

The policy is an autoregressive OpenVLA with random weights in float32. Each kind of sync is made in two ways:

    here    learner and engine in one process: buckets and the engine's loading, no transport
    ray     as a run does it: learner ranks and an engine on a Ray cluster, through the object store; 2 ranks are FSDP's

Seconds are the best of the repeats. Peaks are the growth of the private memory of learner and engine during a sync, and
the memory of the object store; `here` both are one process. Linux only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vlarl.config.schema import Config
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import initialize, tiny_config
from vlarl.policies.tiny_inputs import build_tiny_tokenizer

MB = 10**6
SAMPLE_S = 0.002

EngineKind = Literal["torch", "vllm"]
SyncKind = Literal["full", "LoRA"]


@dataclass(frozen=True)
class Case:
    """What is measured: which weights are sent to which engine, and how."""

    engine: EngineKind
    sync: SyncKind
    num_ranks: int  # learners on a Ray cluster; 0: no cluster
    bucket_mb: int

    @property
    def way(self) -> str:
        """The kind of sync, as shown in the table."""
        return f"ray, {self.num_ranks} rank{'s' * (self.num_ranks > 1)}" if self.num_ranks else "here"


@dataclass(frozen=True)
class Row:
    """The result of one case."""

    engine: str
    sync: str
    way: str
    bucket_mb: int
    sent_mb: float
    num_buckets: int
    seconds: float  # the best of the repeats
    learner_peak_mb: float  # of rank 0; the largest of the repeats, as all peaks are
    engine_peak_mb: float
    store_peak_mb: float


def make_checkpoint(folder: Path, hidden: int, layers: int) -> None:
    """A policy of this width and depth."""
    raw = dict(tiny_config("autoregressive").raw)
    raw["text_config"] |= {
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
    }
    policy = OpenVLAPolicy(parse_config(raw), build_tiny_tokenizer())
    initialize(policy, torch.Generator().manual_seed(0))
    policy.save(folder)


def run_config(folder: Path, case: Case) -> Config:
    """The run that such syncs belong to."""
    return Config.model_validate(
        {
            "run": {"device": "cpu", "num_threads": 1},
            "env": {"suite": "tabletop_spatial", "num_envs": 1},
            "policy": {"path": str(folder), "dtype": "float32"},
            "lora": {"enabled": case.sync == "LoRA", "rank": 32, "target_modules": ("q_proj", "v_proj")},
            "vllm": {"num_engines": int(case.engine == "vllm"), "enforce_eager": True, "max_num_seqs": 8},
            "distributed": {
                "backend": "ray" if case.num_ranks else "local",
                "learners_per_node": (max(case.num_ranks, 1),),
                "sharding": "full" if case.num_ranks > 1 else "none",
                "num_env_workers": 1,
                "worker_cpus": 0.25,
                "sync_bucket_mb": case.bucket_mb,
            },
        }
    )


def memory_mb(pid: int, field: Literal["RssAnon", "RssShmem"]) -> float:
    """Memory of a process: only its own, or the pages of the object store that it has touched."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / MB


class Peaks:
    """The peak growth of the private memory of some processes, polled by a thread."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = pids
        self.grown = [0.0 for _ in pids]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure inside the block; growth is relative to its start."""
        levels = [memory_mb(pid, "RssAnon") for pid in self.pids]
        ended = threading.Event()

        def poll() -> None:
            while not ended.wait(SAMPLE_S):
                now = [memory_mb(pid, "RssAnon") - level for pid, level in zip(self.pids, levels, strict=True)]
                self.grown = [max(pair) for pair in zip(self.grown, now, strict=True)]

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def sync_here(folder: Path, case: Case, repeats: int) -> Row:
    """Learner and engine in this process."""
    from vlarl.bench.sync import send
    from vlarl.distributed.engines import build_torch_engine, build_vllm_engine
    from vlarl.training.prepare import load_trained_policy
    from vlarl.weights.stream import weights_to_send

    torch.set_num_threads(1)
    config = run_config(folder, case)
    on_vllm = case.engine == "vllm"
    engine: Any = build_vllm_engine(config, sleeps=False) if on_vllm else build_torch_engine(config, on_gpu=False)
    weights = weights_to_send(load_trained_policy(config, None, torch.device("cpu")))
    peaks = Peaks([os.getpid()])
    seconds: list[float] = []
    for version in range(1, repeats + 1):
        with peaks.watched():
            begin = time.perf_counter()
            sent = send(engine, weights, case.bucket_mb * MB, version)
            seconds.append(time.perf_counter() - begin)
    return _row(case, sent.num_bytes / MB, sent.num_buckets, min(seconds), peaks.grown[0], peaks.grown[0], 0.0)


def sync_by_ray(folder: Path, case: Case, repeats: int, sent_mb: float, num_buckets: int) -> Row:
    """Learners and engine as workers of a cluster; the sizes sent are known from the same sync here."""
    from vlarl.distributed.engines import EngineGroup
    from vlarl.distributed.learners import LearnerGroup
    from vlarl.observability.run_dir import RunDirectory
    from vlarl.observability.trace import NoTrace
    from vlarl.run.open import launch

    directory = RunDirectory.create(folder.parent, f"run_{time.time_ns()}")
    parts = launch(run_config(folder, case), directory, NoTrace())
    with closing(parts):
        learner, engine = parts.learner, parts.engine
        assert isinstance(learner, LearnerGroup) and isinstance(engine, EngineGroup)
        locations = [worker.location for worker in (learner.workers[0], engine.workers[0])]
        peaks = Peaks([location.pid for location in locations if location is not None])
        store = memory_mb(peaks.pids[0], "RssShmem")
        seconds: list[float] = []
        for _ in range(repeats):
            with peaks.watched():
                begin = time.perf_counter()
                parts.weights.publish()
                seconds.append(time.perf_counter() - begin)
        store = memory_mb(peaks.pids[0], "RssShmem") - store  # the store never releases pages, so this is its peak
        return _row(case, sent_mb, num_buckets, min(seconds), *peaks.grown, store)


def _row(case: Case, *figures: Any) -> Row:
    return Row(case.engine, case.sync, case.way, case.bucket_mb, *figures)


def measure(cases: Sequence[Case], hidden: int, layers: int, repeats: int) -> list[Row]:
    """All cases, each in processes of its own, so that none inherits another's allocator state."""
    rows: list[Row] = []
    sent: dict[tuple[str, int], tuple[float, int]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        make_checkpoint(folder, hidden, layers)
        for case in cases:
            if case.num_ranks:
                rows.append(sync_by_ray(folder, case, repeats, *sent[case.sync, case.bucket_mb]))
            else:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    row = pool.apply(sync_here, (folder, case, repeats))
                rows.append(row)
                sent[case.sync, case.bucket_mb] = row.sent_mb, row.num_buckets
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| engine | weights | way | bucket MB | sent MB | buckets | seconds | learner +MB | engine +MB | store +MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        memory = (
            f"{r.learner_peak_mb:.0f} | {r.engine_peak_mb:.0f} | {r.store_peak_mb:.0f}"
            if r.way != "here"
            else f"{r.learner_peak_mb:.0f}, both | | "
        )
        lines.append(
            f"| {r.engine} | {r.sync} | {r.way} | {r.bucket_mb} | {r.sent_mb:.0f} | {r.num_buckets} "
            f"| {r.seconds:.2f} | {memory} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the language model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--bucket-mb", type=int, nargs="+", default=[64])
    parser.add_argument("--engines", nargs="+", choices=("torch", "vllm"), default=["torch", "vllm"])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="learner ranks on Ray; none: no cluster")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="a small model, the torch engine, one learner rank")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.quick:
        a.hidden, a.layers, a.bucket_mb, a.engines, a.ranks, a.repeats = 256, 6, [8], ["torch"], [1], 2
    cases = [
        Case(engine, sync, num_ranks, bucket_mb)
        for engine in a.engines
        for bucket_mb in a.bucket_mb
        for sync in ("full", "LoRA")
        for num_ranks in (0, *a.ranks)
    ]
    rows = measure(cases, a.hidden, a.layers, a.repeats)
    print(json.dumps([asdict(row) for row in rows], indent=2) if a.json else table(rows))


if __name__ == "__main__":
    main()
