"""Qwen2.5-VL-3B's shape with random weights: texts and updates a second, beside transformers' own generate.

    python benchmarks/vlm_3b.py [--rows 8 32 128] [--text 256] [--image 448] [--out results.json]
    python benchmarks/vlm_3b.py --toy        # a model of a few layers on a CPU: seconds, for CI

Each prompt is one square image and 64 random ids; every text has its full length. Rows of the table:

    engine      vlarl's torch engine: sampling at temperature 1, with the log-prob of every token
    generate    transformers' `generate` on the same prompts: sampling at temperature 1, without log-probs
    update      one optimizer step on as many texts, adapters of rank 32, gradient checkpointing

All are measured in one run, on one device, in bfloat16 on a GPU and float32 on a CPU. The median of the repeats counts,
after one that does not. Peaks are those of torch's allocator on a GPU, and of the process on a CPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import Config, LoraConfig, ModelConfig
from vlarl.decisions import Sampling, TrainBatch
from vlarl.policies.base import BaseCheckpoint
from vlarl.policies.vlm.inputs import Ragged, VlmInputs
from vlarl.policies.vlm.policy import VlmPolicy
from vlarl.policies.vlm.processor import PromptProcessor
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.learner import Learner

GIB = 2**30
PROMPT_IDS = 64
PATCH, MERGE = 14, 2
TEXT: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
    "eos_token_id": None,
    "bos_token_id": None,
}
VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
TOY_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TOY_TEXT |= {"vocab_size": 512, "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [2, 3, 3]}}
TOY_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
TOY_VISION |= {"fullatt_block_indexes": [1]}


def make_policy(toy: bool, device: torch.device) -> VlmPolicy:
    """A model with random weights; it is given ids, so its tokenizer knows no words."""
    text, vision = (TEXT | TOY_TEXT, VISION | TOY_VISION) if toy else (TEXT, VISION)
    last = text["vocab_size"]
    special = {
        f"{name}_token_id": last - 4 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **special)
    torch.manual_seed(0)
    with device:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=dtype, attn_implementation="sdpa")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    processor = PromptProcessor(tokenizer, reads_images=True, in_rows=False)
    policy = VlmPolicy(model.eval(), processor, BaseCheckpoint("random weights", Path("."), ""))
    settings = ModelConfig(gradient_checkpointing=True, dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    policy.prepare_training(settings, LoraConfig(enabled=True, rank=32), seed=0)
    return policy.eval()


def make_inputs(policy: VlmPolicy, rows: int, image: int) -> VlmInputs:
    """As many prompts: one image of this many pixels a side, and ids."""
    config, generator = policy.model.config, torch.Generator().manual_seed(0)
    side = max(image // (PATCH * MERGE), 1) * MERGE
    tokens = side**2 // MERGE**2
    before = torch.tensor([config.vision_start_token_id, *[config.image_token_id] * tokens, config.vision_end_token_id])
    words = torch.randint(0, policy.access.vocabulary - 8, (rows, PROMPT_IDS), generator=generator)
    ids = torch.cat([before.expand(rows, -1), words], dim=1)
    pixels = torch.randn(rows * side**2, 3 * 2 * PATCH**2, generator=generator)
    grids = torch.tensor([[1, side, side]]).expand(rows, -1)
    return VlmInputs(
        ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        mm_token_type_ids=(ids == config.image_token_id).long(),
        pixel_values=Ragged(pixels, torch.full((rows,), side**2)),
        image_grid_thw=Ragged(grids, torch.ones(rows, dtype=torch.int64)),
    )


def plain_generate(policy: VlmPolicy, inputs: VlmInputs, length: int) -> torch.Tensor:
    """The texts of transformers' own generate."""
    given = inputs.to(policy.device)
    assert given.pixel_values is not None and given.image_grid_thw is not None
    model: Any = policy.model
    with torch.no_grad():
        ids: torch.Tensor = model.generate(
            given.ids,
            attention_mask=given.attention_mask.long(),
            mm_token_type_ids=given.mm_token_type_ids,
            pixel_values=given.pixel_values.values.to(model.dtype),
            image_grid_thw=given.image_grid_thw.values,
            do_sample=True,
            top_k=0,
            max_new_tokens=length,
            pad_token_id=0,
        )
    return ids[:, given.ids.shape[1] :]


def make_update(policy: VlmPolicy, engine: TorchEngine, inputs: VlmInputs, sampling: Sampling) -> Callable[[], object]:
    """One optimizer step on texts that the policy wrote."""
    decisions = engine.generate(inputs, sampling, range(len(inputs))).to("cpu")
    advantages = torch.randn(decisions.mask.shape, generator=torch.Generator().manual_seed(0))
    batch = TrainBatch(inputs, decisions, torch.arange(len(inputs)), advantages=advantages)
    optim = {"lr": 1e-6, "microbatch_size": min(len(inputs), 8)}
    config = Config.model_validate({"algorithm": {"epochs": 1}, "optim": optim})
    learner = Learner(policy, build_algorithm(config.algorithm, 1.0, config.kl), config, policy.device)
    return lambda: learner.update(batch, 1, lambda done, planned: None)


def measure(work: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, int]:
    """The median of the seconds, and the peak of memory in bytes."""
    work()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return sorted(times)[len(times) // 2], peak


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--text", type=int, default=256, help="tokens of a text")
    parser.add_argument("--image", type=int, default=448, help="pixels of an image side")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.toy else "cpu")
    policy = make_policy(args.toy, device)
    engine, sampling = TorchEngine(policy, device), Sampling(1.0, max_tokens=args.text)
    results = []
    print("| rows | what | s | tokens/s | peak GiB |\n| --- | --- | --- | --- | --- |")
    for rows in args.rows:
        inputs = make_inputs(policy, rows, args.image)
        ways = {
            "engine": lambda inputs=inputs: engine.generate(inputs, sampling, range(len(inputs))),
            "generate": lambda inputs=inputs: plain_generate(policy, inputs, args.text),
            "update": make_update(policy, engine, inputs, sampling),
        }
        for way, work in ways.items():
            seconds, peak = measure(work, device, args.repeats)
            result = {"rows": rows, "what": way, "seconds": seconds, "tokens": rows * args.text, "peak_bytes": peak}
            results.append(result)
            speed = result["tokens"] / seconds
            print(f"| {rows} | {way} | {seconds:.2f} | {speed:.0f} | {peak / GIB:.2f} |", flush=True)
    if args.out is not None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        prompt = int(inputs.lengths[0])
        found = {
            "device": name,
            "prompt_tokens": prompt,
            "parameters": policy.model.num_parameters(),
            "results": results,
        }
        args.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
