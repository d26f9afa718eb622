"""Time and memory of weight syncs into a vLLM engine: full, and of what LoRA adapters change. Prints a table, or JSON.

    python benchmarks/weight_sync.py [--hidden 1024] [--layers 12] [--bucket-mib 16 64] [--json]

The policy is an autoregressive OpenVLA with random weights. Learner and engine share this process, so that a sync is
the folding, the buckets and vLLM's loading, and no transport. Peak memory is what the resident set grows by during a
sync, over the level before it (Linux only).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.policies import load_policy
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import build_tiny_tokenizer, initialize, tiny_config
from vlarl.rollout.vllm_engine import VllmEngine, VllmOptions, bucket
from vlarl.rollout.weight_stream import ChangedWeights, WeightStream, buckets

MIB = 2**20
REPEATS = 3


@dataclass(frozen=True)
class Row:
    """One kind of sync with one size of buckets."""

    kind: str
    bucket_mib: int
    sent_mib: float
    num_buckets: int
    seconds: float  # the best of the repeats
    peak_mib: float  # the largest of the repeats


def make_checkpoint(folder: Path, hidden: int, layers: int) -> None:
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


def resident_mib(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measure(engine: VllmEngine, kind: str, weights: WeightStream, bucket_mib: int, version: int) -> Row:
    seconds: list[float] = []
    peaks: list[float] = []
    sizes: list[int] = []
    for repeat in range(REPEATS):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here on
        level = resident_mib("VmRSS")
        begin = time.perf_counter()
        engine.start_sync(weights.shapes, version + repeat)
        sizes = []
        for payload in buckets(weights, bucket_mib * MIB):
            engine.update_weights(bucket(payload, checksum=False))
            sizes.append(len(payload))
        engine.finish_sync(version + repeat)
        seconds.append(time.perf_counter() - begin)
        peaks.append(resident_mib("VmHWM") - level)
    return Row(kind, bucket_mib, sum(sizes) / MIB, len(sizes), min(seconds), max(peaks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the language model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder, arguments.hidden, arguments.layers)
        begin = time.perf_counter()
        engine = VllmEngine(folder, VllmOptions(dtype="float32", enforce_eager=True, max_num_seqs=8))
        start_seconds = time.perf_counter() - begin
        learner = load_policy(folder)
        full = ChangedWeights(learner, engine_has_base=False).next()
        for size in arguments.bucket_mib:
            rows.append(measure(engine, "full", full, size, 1))
        lora = LoraConfig(enabled=True, rank=32, target_modules=("q_proj", "v_proj"))
        learner.prepare_training(ModelConfig(), lora, seed=0)
        folded = ChangedWeights(learner, engine_has_base=True).next()
        for size in arguments.bucket_mib:
            rows.append(measure(engine, "LoRA on q, v", folded, size, 11))
    if arguments.json:
        print(json.dumps({"engine_start_s": start_seconds, "syncs": [asdict(row) for row in rows]}, indent=2))
        return
    print(f"engine start {start_seconds:.1f} s, imports of vLLM included")
    print(f"{'sync':14}{'bucket MiB':>12}{'sent MiB':>12}{'buckets':>9}{'seconds':>10}{'peak MiB':>10}")
    for row in rows:
        print(
            f"{row.kind:14}{row.bucket_mib:12d}{row.sent_mib:12.1f}{row.num_buckets:9d}{row.seconds:10.2f}"
            f"{row.peak_mib:10.0f}"
        )


if __name__ == "__main__":
    main()
