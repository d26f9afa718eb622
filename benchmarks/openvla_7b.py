"""OpenVLA-7B's shape with random weights on one GPU: write, load, quantise, merge. Prints a table, writes JSON.

    python benchmarks/openvla_7b.py FOLDER [--out results.json] [--stages write load quantized merge]

FOLDER gets a checkpoint in the original layout (15 GB, sharded); an existing one is reused. The original's tokenizer is
not needed: prompts are 32 random ids, as long as LIBERO's. Every figure is measured here. Decisions and updates of this
checkpoint are measured by `vlarl bench` (benchmarks/h200.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import Config, LoraConfig, ModelConfig
from vlarl.decisions import TrainBatch
from vlarl.export.merge import merge
from vlarl.policies.distribution import greedy
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.memory import estimate_lora_update, estimate_rollout
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny_inputs import build_tiny_tokenizer
from vlarl.training.learner import Learner

GIB = 2**30
PROMPT_LENGTH = 32
LORA = LoraConfig(enabled=True, rank=32)

STATISTICS = {
    "action": {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]},
    "proprio": {"q01": [-1.0] * 8, "q99": [1.0] * 8},
}
RAW: dict[str, Any] = {
    "model_type": "openvla",
    "architectures": ["OpenVLAForActionPrediction"],
    "vision_backbone_id": "dinosiglip-vit-so-224px",
    "use_fused_vision_backbone": True,
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "image_sizes": [224, 224],
    "image_resize_strategy": "resize-naive",
    "n_action_bins": 256,
    "pad_to_multiple_of": 64,
    "pad_token_id": 32000,
    "text_config": {"model_type": "llama", "vocab_size": 32064},
    "norm_stats": {"random": STATISTICS},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("openvla_7b.json"))
    parser.add_argument("--stages", nargs="+", choices=tuple(STAGES), default=list(STAGES))
    given = parser.parse_args()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for stage in given.stages:
        print(f"== {stage}", flush=True)
        results[stage] = STAGES[stage](given.folder)
        given.out.write_text(json.dumps(results, indent=2))
    print(json.dumps(results, indent=2))


def write(folder: Path) -> dict[str, Any]:
    """Random weights in the original layout, with activations large enough for distinct logits."""
    if (folder / "config.json").is_file():
        return {"kept": str(folder)}
    with torch.device("meta"):
        policy = OpenVLAPolicy(parse_config(RAW), build_tiny_tokenizer())
    policy.model.to_empty(device="cuda").to(torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 0.5)
    started = time.perf_counter()
    policy.save(folder)
    seconds = time.perf_counter() - started
    shards = sorted(folder.glob("model-*.safetensors"))
    return {
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "shards": len(shards),
        "largest_shard_gib": round(max(s.stat().st_size for s in shards) / GIB, 2),
        "seconds": round(seconds, 1),
    }


def load(folder: Path) -> dict[str, Any]:
    """Load directly onto the GPU: time, and peak host memory."""
    torch.zeros(1, device="cuda")
    before = host_peak()
    started = time.perf_counter()
    policy = load_policy(folder, dtype="bfloat16", device="cuda")
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    largest = max(s.stat().st_size for s in folder.glob("model-*.safetensors"))
    result = {
        "seconds": round(seconds, 1),
        "gpu_gib": round(torch.cuda.memory_allocated() / GIB, 2),
        "host_peak_gib": round((host_peak() - before) / GIB, 2),
        "host_peak_over_largest_shard": round((host_peak() - before) / largest, 3),
        "config": type(policy.config).__name__,
    }
    return result


def host_peak() -> int:
    """The peak memory of this process, including file pages."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def quantized(folder: Path) -> dict[str, Any]:
    """The base in 4 and in 8 bits: memory, and speed of rollout and update."""
    results: dict[str, Any] = {}
    bits: Any
    for bits in (4, 8):
        policy = load_policy(folder, dtype="bfloat16", device="cuda", quantize=bits)
        results[f"{bits} bits, weights_gib"] = round(torch.cuda.memory_allocated() / GIB, 2)
        inputs = make_inputs(policy, 16)
        peak, seconds = measure(lambda p=policy, i=inputs: p.decode(i, lambda lg, _: greedy(lg)), repeats=3)
        estimate = estimate_rollout(policy.config, 16, PROMPT_LENGTH, "bfloat16", bits).total
        results[f"{bits} bits, autoregressive 16"] = line(16, seconds, peak, estimate)
        settings = ModelConfig(dtype="bfloat16", quantize=bits, gradient_checkpointing=True)
        policy.prepare_training(settings, LORA, seed=0)
        learner, batch = make_learner(policy, 8), make_batch(policy, 8)
        peak, seconds = measure(lambda lr=learner, b=batch: lr.update(b, 1, lambda done, of: None), repeats=3)
        estimate = estimate_lora_update(policy.config, 8, PROMPT_LENGTH, "bfloat16", LORA.rank, True, bits).total
        results[f"{bits} bits, microbatch 8"] = line(8, seconds, peak, estimate)
        del policy, learner
        free()
    return results


def merge_stage(folder: Path) -> dict[str, Any]:
    """An adapter of this size, merged in float32 on the GPU, checked and written."""
    policy = adapted(folder, "autoregressive")
    generator = torch.Generator("cuda").manual_seed(1)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0.0, 0.002, generator=generator)
    adapter, out = folder.with_name("adapter"), folder.with_name("merged")
    policy.save(adapter)
    size = (adapter / "adapter_model.safetensors").stat().st_size
    del policy
    free()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    done = merge(adapter, out, device="cuda")
    result = {
        "adapter_mib": round(size / 2**20),
        "seconds": round(time.perf_counter() - started, 1),
        "gpu_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "logit_error": done.logit_error,
        "rounding_error": done.rounding_error,
        "dtype": done.dtype,
        "files": sorted(path.name for path in out.iterdir()),
    }
    shutil.rmtree(out)
    return result


def adapted(folder: Path, decoder: Any, **settings: Any) -> OpenVLAPolicy:
    policy = load_policy(folder, decoder=decoder, dtype="bfloat16", device="cuda")
    policy.prepare_training(ModelConfig(dtype="bfloat16", **settings), LORA, seed=0)
    return policy.eval()


def make_inputs(policy: OpenVLAPolicy, batch: int, device: str = "cuda") -> OpenVLAInputs:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, policy.config.first_action_id, (batch, PROMPT_LENGTH), generator=generator)
    ids[:, 0] = 1
    size = policy.config.image_size
    pixels = torch.randint(0, 256, (batch, policy.config.num_images, 3, size, size), generator=generator)
    return OpenVLAInputs(ids, torch.ones_like(ids, dtype=torch.bool), pixels.to(torch.uint8), None).to(device)


def make_learner(policy: OpenVLAPolicy, microbatch_size: int, device: Any = "cuda", **optim: Any) -> Learner:
    config = Config().model_copy(
        update={
            "algorithm": Config().algorithm.model_copy(update={"epochs": 1, "old_logprobs": "engine"}),
            "optim": Config().optim.model_copy(update={"microbatch_size": microbatch_size, "lr": 1e-5} | optim),
        }
    )
    return Learner(policy, build_algorithm(config.algorithm, 1.0), config, torch.device(device))


def make_batch(policy: OpenVLAPolicy, rows: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    shape = (rows, policy.config.num_action_tokens)
    indices = torch.randint(0, 256, shape, generator=generator)
    logprobs = torch.full(shape, -5.5)
    return TrainBatch(
        inputs=make_inputs(policy, rows, "cpu"),
        decisions=token_decisions(indices + policy.codec.first_id, logprobs, policy.action_dim),
        trajectory=torch.arange(rows),
        old_logprobs=logprobs,
        advantages=torch.randn(shape, generator=generator),
    )


def measure(work: Callable[[], object], repeats: int = 5) -> tuple[int, float]:
    """Peak bytes on the GPU and the median of the seconds, after a warm-up (a graph is recorded in the second call)."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return torch.cuda.max_memory_allocated(), sorted(times)[len(times) // 2]


def line(count: int, seconds: float, peak: int, estimate: float) -> dict[str, Any]:
    found = {
        "ms": round(seconds * 1000, 1),
        "per_s": round(count / seconds, 1),
        "peak_gib": round(peak / GIB, 2),
        "estimated_gib": round(estimate / GIB, 2),
        "estimate_error": f"{(estimate - peak) / peak:+.1%}",
    }
    print(found, flush=True)
    return found


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


STAGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "write": write,
    "load": load,
    "quantized": quantized,
    "merge": merge_stage,
}

if __name__ == "__main__":
    main()
