"""LoRA updates of OpenVLA-7B's shape on one GPU: before and after, gradients compared, and where the time goes.

    python benchmarks/update_speed.py FOLDER                       # as for openvla_7b.py, made if missing
    python benchmarks/update_speed.py FOLDER --cases plain/8 recorded/8 --no-checks
    python benchmarks/update_speed.py FOLDER --toy                 # the same depth, tiny, on the CPU

A case is VARIANT/MICROBATCH or VARIANT/MICROBATCH/KEPT, with KEPT layers and vision blocks of 81 whose activations are
kept instead of recomputed. Variants:

    plain      kernels launched one by one (optim.cuda_graphs false)
    recorded   forward, recomputation and backward of a microbatch replayed as a CUDA graph

Each case prints samples/s of `Learner.update` (the median, after warm-up), peak memory, and how long the host took.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from openvla_7b import GIB, LORA, RAW, adapted, free, make_batch, make_learner, write

from vlarl.config.derive import microbatch_size
from vlarl.decisions import TrainBatch
from vlarl.policies.lora import LoraLinear
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny_inputs import build_tiny_tokenizer
from vlarl.training.learner import Learner

CASES = ("plain/1", "recorded/1", "plain/8", "recorded/8", "recorded/8/8", "plain/32", "recorded/32", "recorded/32/81")
TOY_TEXT = {
    **{"model_type": "llama", "vocab_size": 32064, "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 32, "num_attention_heads": 4, "num_key_value_heads": 4},
}
TOY = RAW | {
    "text_config": TOY_TEXT,
    "timm_model_kwargs": [
        {"embed_dim": 32, "num_heads": 2, "patch_size": 56},
        {"embed_dim": 32, "num_heads": 2, "patch_size": 56},
    ],
}
PATIENCE_S = 6  # of a case, after which three repeats are enough
KINDS = {  # what a kernel's name contains -> what it does
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitK"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "norms": ("norm",),
    "concatenation": ("CatArray", "cat_"),
    "copies": ("copy", "Memcpy", "Memset", "fill"),
    "sums": ("reduce",),
    "optimizer": ("multi_tensor", "Adam"),
    "elementwise": ("elementwise", "vectorized"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--profile", default="recorded/8", help="the case whose kernels are listed; none lists nothing")
    parser.add_argument("--checks", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("update_speed.json"))
    parser.add_argument("--toy", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    policy = toy_policy(given.folder) if given.toy else full_policy(given.folder)
    set_adapters(policy)
    results: dict[str, Any] = {"torch": torch.__version__}

    def keep(name: str, found: Any) -> None:
        results[name] = found
        print(f"{name}: {json.dumps(found)}", flush=True)
        given.out.write_text(json.dumps(results, indent=2))

    if given.checks:
        keep("gradients", compare_gradients(policy))
    for case in given.cases:
        keep(case, measured(policy, case, given.repeats))
    if given.profile != "none":
        keep("profile", profiled(policy, given.profile))


def full_policy(folder: Path) -> OpenVLAPolicy:
    write(folder)
    free()
    return adapted(folder, "autoregressive", gradient_checkpointing=True)


def toy_policy(folder: Path) -> OpenVLAPolicy:
    from vlarl.config.schema import ModelConfig
    from vlarl.policies.load import load_policy

    if not (folder / "config.json").is_file():
        policy = OpenVLAPolicy(parse_config(TOY), build_tiny_tokenizer())
        for parameter in policy.model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, 0.0, 0.05)
        policy.save(folder)
    policy = load_policy(folder, dtype="float32")
    policy.prepare_training(ModelConfig(gradient_checkpointing=True), LORA, seed=0)
    return policy.eval()


@torch.no_grad()
def set_adapters(policy: OpenVLAPolicy) -> None:
    """Adapters as after some training: with fresh ones, the gradient of A is zero."""
    generator = torch.Generator(policy.device).manual_seed(1)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.normal_(0.0, 0.002, generator=generator)
    policy.weights_changed()


def prepared(policy: OpenVLAPolicy, case: str) -> tuple[Learner, TrainBatch]:
    """The learner of a case, and a batch of one minibatch."""
    variant, size, *kept = case.split("/")
    assert variant in ("plain", "recorded"), f"unknown variant {variant}"
    policy.model.checkpoint_layers(True, kept=int(kept[0]) if kept else 0)
    learner = make_learner(policy, int(size), policy.device, cuda_graphs=variant == "recorded")
    return learner, make_batch(policy, max(int(size), 8))


def measured(policy: OpenVLAPolicy, case: str, repeats: int) -> dict[str, Any]:
    """Samples a second of an update, its memory, and the seconds until the host had launched all of it."""
    free_here(policy)
    learner, batch = prepared(policy, case)
    warm = 4 if learner.recorded is not None else 1  # the third pass of a shape is recorded
    started = time.perf_counter()
    for _ in range(warm):
        learner.update(batch, 1, ignore)
    wait(policy)
    warm_up = time.perf_counter() - started
    reset_peak(policy)
    seconds, host = [], []
    for _ in range(repeats):
        if len(seconds) >= 3 and sum(seconds) > PATIENCE_S:
            break
        started = time.perf_counter()
        learner.update(batch, 1, ignore)
        wait(policy)
        seconds.append(time.perf_counter() - started)
        rows = torch.arange(len(batch))
        part = learner._minibatch(batch, rows, True)
        run = pass_of(learner, part, rows)
        learner._train_mode(True)
        began = time.perf_counter()
        run(on_device(learner, part.rows(rows[: microbatch_size(learner.config.optim)])))
        host.append(time.perf_counter() - began)
        learner._train_mode(False)
        wait(policy)
    found = {
        "samples_per_s": round(len(batch) / sorted(seconds)[len(seconds) // 2], 2),
        "ms": [round(1000 * s, 1) for s in seconds],
        "host_ms_of_a_microbatch": round(1000 * sorted(host)[len(host) // 2], 1),
        "warm_up_s": round(warm_up, 1),
        **memory(policy),
    }
    del learner, run
    free_here(policy)
    return found


def ignore(done: int, of: int) -> None:
    """Called after each optimizer step."""


def pass_of(learner: Learner, batch: TrainBatch, rows: torch.Tensor) -> Any:
    """What the learner runs for each microbatch of these rows."""
    for optimizer in learner.optimizers():
        optimizer.zero_grad(set_to_none=learner.recorded is None)
    if learner.recorded is None:
        return lambda part: learner._pass(part, True, 1.0, 0.0)
    learner.recorded.begin(1.0, 0.0)
    return lambda part: learner.recorded(part, True)


def on_device(learner: Learner, part: TrainBatch) -> TrainBatch:
    return part.to(learner.device)


def compare_gradients(policy: OpenVLAPolicy) -> dict[str, Any]:
    """All adapters' gradients of one microbatch of 8: recorded against plain, and plain against peft's own layers."""
    learner, batch = prepared(policy, "plain/8")
    rows = torch.arange(len(batch))
    part = on_device(learner, learner._minibatch(batch, rows, True))

    def gradients(learner: Learner, times: int) -> list[torch.Tensor]:
        for _ in range(times):
            run = pass_of(learner, batch, rows)
            learner._train_mode(True)
            run(part)
            learner._train_mode(False)
        return [p.grad.detach().clone() for p in policy.parameters() if p.grad is not None]

    plain = gradients(learner, 1)
    again = gradients(learner, 1)
    recorded = gradients(prepared(policy, "recorded/8")[0], 5)  # run twice, recorded, replayed twice
    own, LoraLinear._adapted = LoraLinear._adapted, theirs  # type: ignore[method-assign]
    peft = gradients(prepared(policy, "plain/8")[0], 1)
    LoraLinear._adapted = own  # type: ignore[method-assign]
    found = {
        "adapters": len(plain),
        "norm": round(float(torch.stack([g.norm() for g in plain]).norm()), 6),
        "plain again": difference(plain, again),
        "recorded": difference(plain, recorded),
        "peft": difference(plain, peft),
    }
    free_here(policy)
    return found


def theirs(layer: LoraLinear, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """peft's layer: the frozen layer's output, rounded, plus the adapter's."""
    name = layer.active_adapters[0]
    low = layer.lora_A[name](x.to(layer.lora_A[name].weight.dtype))
    added = layer.lora_B[name](low) * layer.scaling[name]
    return (layer.base_layer(x) + added).to(dtype)


def difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> dict[str, Any]:
    """How far two lists of gradients are apart."""
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in zip(first, second, strict=True)]
    cosines = torch.stack([torch.cosine_similarity(a, b, 0) for a, b in pairs])
    a, b = (torch.cat(each) for each in zip(*pairs, strict=True))
    return {
        "equal": all(torch.equal(*pair) for pair in pairs),
        "cosine_of_all": round(float(torch.cosine_similarity(a, b, 0)), 7),
        "least_cosine": round(float(cosines.min()), 7),
        "largest_difference_over_largest": float((a - b).abs().max() / a.abs().max()),
    }


def profiled(policy: OpenVLAPolicy, case: str) -> dict[str, Any]:
    """The kernels of an update: milliseconds on the GPU by kind, and the longest ones."""
    learner, batch = prepared(policy, case)
    cuda = policy.device.type == "cuda"
    for _ in range(4 if cuda else 1):
        learner.update(batch, 1, ignore)
    wait(policy)
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        started = time.perf_counter()
        learner.update(batch, 1, ignore)
        wait(policy)
        wall = 1000 * (time.perf_counter() - started)
    times: dict[str, float] = {}
    calls: dict[str, int] = {}
    for event in profile.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if spent > 0:
            times[event.key], calls[event.key] = spent / 1000, event.count
    kinds: dict[str, float] = defaultdict(float)
    for name, spent in times.items():
        kinds[next((k for k, parts in KINDS.items() if any(p in name for p in parts)), "other")] += spent
    longest = sorted(times, key=lambda name: -times[name])[:25]
    return {
        "case": case,
        "wall_ms": round(wall, 1),
        "busy": round(sum(times.values()) / wall, 3),
        "kernels": sum(calls.values()),
        "kinds_ms": {k: round(v, 2) for k, v in sorted(kinds.items(), key=lambda item: -item[1])},
        "longest": [f"{times[n]:8.2f} ms {calls[n]:6d} x {n[:110]}" for n in longest],
    }


def wait(policy: OpenVLAPolicy) -> None:
    if policy.device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak(policy: OpenVLAPolicy) -> None:
    if policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def memory(policy: OpenVLAPolicy) -> dict[str, float]:
    """Peaks of what was allocated and of what the allocator held, recordings included, and the device's own count."""
    if policy.device.type != "cuda":
        return {}
    available, total = torch.cuda.mem_get_info()
    return {
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
        "used_on_device_gib": round((total - available) / GIB, 2),
    }


def free_here(policy: OpenVLAPolicy) -> None:
    for parameter in policy.parameters():
        parameter.grad = None
    free()


if __name__ == "__main__":
    main()
