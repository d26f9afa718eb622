"""OpenVLA-7B's shape on one GPU: what `vlarl bench` measures, beside transformers and peft, in one run and one file.

    python benchmarks/h200.py FOLDER [--out benchmarks/results/h200.json] [--parts NAME ...] [--memory-gb N]
    python benchmarks/h200.py FOLDER --toy          # tiny models and few repeats, on a CPU: what CI can run

FOLDER gets the checkpoint with random weights that openvla_7b.py writes (15 GB); an existing one is reused. The file is
written after every part, so that a run that is cut off keeps what it measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openvla_7b import write

from vlarl.bench.iteration import bench_iteration
from vlarl.bench.request import BenchRequest
from vlarl.bench.results import Report
from vlarl.bench.rollout import bench_rollout
from vlarl.bench.sync import bench_sync
from vlarl.bench.update import bench_update

TOY = {"autoregressive": "builtin:tiny-openvla", "parallel": "builtin:tiny-oft"}
SYNC_BUCKET_MB = 256


def parts(folder: Path, memory_gb: float | None, toy: bool) -> dict[str, Callable[[], Report]]:
    """The table, one entry for each command."""

    def request(decoder: Any, repeats: int, **options: Any) -> BenchRequest:
        model = TOY[decoder] if toy else str(folder)
        rank = 8 if toy else 32
        found = {"repeats": 1 if toy else repeats, "memory_gb": memory_gb, "rank": rank, **options}
        return BenchRequest(model, decoder, **found)

    batches, chunks, sizes = ([1, 4], [1, 2], [1, 4]) if toy else ([1, 64], [1, 32], [1, 8, 32])
    decisions, rows = (32, 4) if toy else (1024, 32)
    return {
        "rollout": lambda: bench_rollout(request("autoregressive", 5), batches),
        "rollout_oft": lambda: bench_rollout(request("parallel", 5), chunks),
        "update": lambda: bench_update(request("autoregressive", 3), sizes),
        "iteration_oft": lambda: bench_iteration(request("parallel", 1), decisions, rows, rows),
        "sync": lambda: bench_sync(request("autoregressive", 3, adapters=True), SYNC_BUCKET_MB),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200.json"))
    parser.add_argument("--parts", nargs="+", choices=tuple(parts(Path(), None, True)))
    parser.add_argument("--memory-gb", type=float, help="GPU memory in GiB that may be used")
    parser.add_argument("--toy", action="store_true")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    if not given.toy:
        begin = time.perf_counter()
        results["checkpoint"] = write(given.folder)
        seconds["write"] = time.perf_counter() - begin
    for name, measure in parts(given.folder, given.memory_gb, given.toy).items():
        if given.parts and name not in given.parts:
            continue
        begin = time.perf_counter()
        report = measure()
        seconds[name] = time.perf_counter() - begin
        print(*report.lines(), "", sep="\n", flush=True)
        results[name] = report.to_json()
        given.out.write_text(json.dumps({"seconds": seconds, **results}, indent=2) + "\n", encoding="utf-8")
    print(", ".join(f"{name} {each:.0f} s" for name, each in seconds.items()))


if __name__ == "__main__":
    main()
