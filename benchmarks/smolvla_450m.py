"""SmolVLA's real shape with random weights: decisions and update samples a second, and their memory.

    python benchmarks/smolvla_450m.py [--rows 1 64] [--update-rows 8 64] [--limit-gb 16] [--out results.json]
    python benchmarks/smolvla_450m.py --toy        # a few layers on a CPU: seconds, for CI

The sizes are those of lerobot/smolvla_base and of SmolVLM2-500M-Video-Instruct: 16 layers of width 960, an expert of
width 720, 512 px, chunks of 50 actions, 10 Euler steps. An observation is three views of 256 px, an instruction of
16 tokens and a state of 8. Rows of the table:

    decide      vlarl's torch engine: a chunk by Flow-SDE, with the log-prob of every executed value
    update      one optimizer step of GRPO on as many decisions: the expert and the projections, the backbone is frozen

On a GPU the backbone is bfloat16 and the expert float32, as `policy.dtype bfloat16` has it; on a CPU all is float32.
The median of the repeats counts, after one that does not. Peaks are those of torch's allocator on a GPU, and of the
process on a CPU. `--limit-gb` measures all of it again with no more than that much memory of the device.

So far only `--toy` has been run; there are no figures at the real size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from vlm_3b import GIB, measure

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import Config, LoraConfig, ModelConfig
from vlarl.decisions import Sampling, TrainBatch
from vlarl.policies.flow import Denoising
from vlarl.policies.smolvla.config import parse_config
from vlarl.policies.smolvla.inputs import SmolVLAInputs
from vlarl.policies.smolvla.policy import Conventions, SmolVLAPolicy
from vlarl.policies.smolvla.processor import Processor
from vlarl.policies.smolvla.tiny import initialize, unit_scalings
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.learner import Learner

VIEW, INSTRUCTION = 256, 16  # pixels of a side of what the cameras show, and tokens
BACKBONE: dict[str, Any] = {
    "model_type": "smolvlm",
    "image_token_id": 49190,
    "pad_token_id": 2,
    "scale_factor": 4,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    },
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}
TOY_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
TOY_TEXT |= {"head_dim": 16, "vocab_size": 64}
TOY_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def policy_config(toy: bool) -> dict[str, Any]:
    """config.json of lerobot/smolvla_base, as far as it defines sizes, with LIBERO's state and actions."""
    size = BACKBONE["vision_config"]["image_size"] // (8 if toy else 1)
    view = {"type": "VISUAL", "shape": [3, VIEW, VIEW]}
    return {
        "input_features": {
            **{f"observation.images.camera{i}": view for i in (1, 2, 3)},
            "observation.state": {"type": "STATE", "shape": [8]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [7]}},
        "chunk_size": 50,
        "n_action_steps": 50,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "resize_imgs_with_padding": [size, size],
        "tokenizer_max_length": 48,
        "num_steps": 10,
        "num_vlm_layers": 2 if toy else 16,
        "self_attn_every_n_layers": 2,
        "expert_width_multiplier": 0.75,
    }


def backbone_config(toy: bool) -> dict[str, Any]:
    """config.json of the backbone."""
    if not toy:
        return BACKBONE
    text, vision = BACKBONE["text_config"] | TOY_TEXT, BACKBONE["vision_config"] | TOY_VISION | {"image_size": 64}
    return BACKBONE | {"text_config": text, "vision_config": vision, "scale_factor": 2, "image_token_id": 1}


def make_policy(toy: bool, device: torch.device, executed: int) -> SmolVLAPolicy:
    """A policy with random weights; it is given ids, so its tokenizer knows no words."""
    config = parse_config(policy_config(toy), backbone_config(toy))
    processor = Processor(config, Tokenizer(models.BPE()), 0, unit_scalings(config), len(config.views))
    policy = SmolVLAPolicy(config, processor, Conventions(Denoising(config.num_steps), executed))
    initialize(policy.model, torch.Generator().manual_seed(0))
    if device.type == "cuda":
        policy.model.vlm_with_expert.vlm.to(torch.bfloat16)
    policy.to(device)
    policy.prepare_training(ModelConfig(), LoraConfig(), seed=0)
    return policy.eval()


def make_inputs(policy: SmolVLAPolicy, rows: int) -> SmolVLAInputs:
    """As many observations: views, an instruction and a state."""
    config, generator = policy.config, torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (rows, INSTRUCTION), generator=generator)
    shape = (rows, policy.num_images, 3, *config.view_shape)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    state = torch.randn(rows, config.max_state_dim, generator=generator)
    return SmolVLAInputs(tokens, torch.ones_like(tokens, dtype=torch.bool), pixels, state)


def make_update(
    policy: SmolVLAPolicy, engine: TorchEngine, inputs: SmolVLAInputs, microbatch: int
) -> Callable[[], object]:
    """One optimizer step on decisions of the policy."""
    decisions = engine.generate(inputs, Sampling(1.0), range(len(inputs))).to("cpu")
    advantages = torch.randn(decisions.mask.shape, generator=torch.Generator().manual_seed(0))
    batch = TrainBatch(inputs, decisions, torch.arange(len(inputs)), advantages=advantages)
    optim = {"lr": 1e-6, "microbatch_size": min(len(inputs), microbatch)}
    config = Config.model_validate({"algorithm": {"epochs": 1}, "optim": optim})
    learner = Learner(policy, build_algorithm(config.algorithm, 1.0, config.kl), config, policy.device)
    return lambda: learner.update(batch, 1, lambda done, planned: None)


def table(args: argparse.Namespace, policy: SmolVLAPolicy, device: torch.device, limit: str) -> list[dict[str, Any]]:
    """All measurements under one limit of memory; what does not fit is a row without seconds."""
    engine, results = TorchEngine(policy, device, cuda_graphs=not args.eager), []
    work: list[tuple[str, int, Callable[[], Callable[[], object]]]] = []
    for rows in args.rows:
        inputs = make_inputs(policy, rows)
        work.append(("decide", rows, lambda i=inputs: lambda: engine.generate(i, Sampling(1.0), range(len(i)))))
    for rows in args.update_rows:
        inputs = make_inputs(policy, rows)
        work.append(("update", rows, lambda i=inputs: make_update(policy, engine, i, args.microbatch)))
    for what, rows, prepare in work:
        try:
            seconds, peak = measure(prepare(), device, args.repeats)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            seconds, peak = float("nan"), 0
        results.append({"what": what, "rows": rows, "limit": limit, "seconds": seconds, "peak_bytes": peak})
        print(f"| {what} | {rows} | {limit} | {seconds:.3f} | {rows / seconds:.1f} | {peak / GIB:.2f} |", flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64], help="observations of a decision's batch")
    parser.add_argument("--update-rows", type=int, nargs="+", default=[8, 64], help="decisions of an update")
    parser.add_argument("--microbatch", type=int, default=32)
    parser.add_argument("--executed", type=int, default=10, help="actions of a chunk that are executed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--limit-gb", type=float, help="measure all of it again with so many GB (10^9 bytes)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.toy else "cpu")
    policy = make_policy(args.toy, device, args.executed)
    print("| what | rows | limit | s | rows/s | peak GiB |\n| --- | --- | --- | --- | --- | --- |")
    results = table(args, policy, device, "none")
    if args.limit_gb is not None and device.type == "cuda":
        torch.cuda.empty_cache()
        fraction = args.limit_gb * 1e9 / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(fraction)
        results += table(args, policy, device, f"{args.limit_gb:g} GB")
    if args.out is not None:
        found = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "parameters": sum(p.numel() for p in policy.model.parameters()),
            "prefix_tokens": policy.num_images * policy.config.tower.tokens + INSTRUCTION + 1,
            "results": results,
        }
        args.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
