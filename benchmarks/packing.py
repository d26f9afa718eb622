"""Updates on texts of very different lengths: padded, sorted, by a budget of tokens, packed. One run measures them all.

    python benchmarks/packing.py [--threads 1] [--rows 32] [--longest 512] [--layers 6] [--out results.json]

A Qwen2 with random weights is trained on random texts, with a learning rate of 0. The ways are measured in turn, so
that what else the machine does affects all of them; CPU time is taken, and the fastest round of each counts. `dense` is
packing with the library's own mask, of all pairs of tokens, in place of one call of the attention for each sample.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import Config
from vlarl.decisions import TrainBatch
from vlarl.policies.vlm.decisions import TextSample, text_decisions
from vlarl.policies.vlm.inputs import VlmInputs
from vlarl.policies.vlm.policy import VlmPolicy
from vlarl.policies.vlm.processor import PromptProcessor
from vlarl.training.learner import Learner

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
WAYS: dict[str, dict[str, Any]] = {
    "padded, 8 rows": {"microbatch_size": 8},
    "padded, 8 rows, sorted": {"microbatch_size": 8, "sort_by_length": True},
    "padded, 4096 tokens, sorted": {"microbatch_tokens": 4096, "sort_by_length": True},
    "packed, 4096 tokens": {"microbatch_tokens": 4096, "packing": True},
    "packed, 4096 tokens, dense": {"microbatch_tokens": 4096, "packing": True},
}


def make_policy(layers: int, vocabulary: int) -> VlmPolicy:
    """A model with random weights; it is given ids, so its tokenizer knows no words."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_hidden_layers=layers, vocab_size=vocabulary))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    return VlmPolicy(model.eval(), PromptProcessor(tokenizer, reads_images=False, in_rows=False))


def make_batch(rows: int, vocabulary: int, longest: int) -> TrainBatch:
    """Prompts of 16 to 128 tokens and texts of 8 to `longest`, both uniform in their logarithm."""
    generator = torch.Generator().manual_seed(0)

    def lengths(low: int, high: int) -> torch.Tensor:
        return (low * (high / low) ** torch.rand(rows, generator=generator)).long()

    prompts, texts = lengths(16, 128), lengths(8, longest)
    ids = [torch.randint(0, vocabulary, (rows, int(each.max())), generator=generator) for each in (prompts, texts)]
    attended = torch.arange(ids[0].shape[1]) < prompts[:, None]
    sample = TextSample(ids[1], texts, torch.ones(rows, dtype=torch.bool))
    decisions = text_decisions(sample, torch.zeros(ids[1].shape))
    advantages = torch.randn(decisions.mask.shape, generator=generator)
    return TrainBatch(VlmInputs(ids[0], attended), decisions, torch.arange(rows), advantages=advantages)


def update(way: str, optim: dict[str, Any], batch: TrainBatch, policy: VlmPolicy) -> Callable[[], dict[str, float]]:
    """One update in this way, as the loop makes it: one step, so no pass before it."""
    config = Config.model_validate({"algorithm": {"epochs": 1}, "optim": {"lr": 0.0, **optim}})
    learner = Learner(policy, build_algorithm(config.algorithm, 1.0, config.kl), config, torch.device("cpu"))
    if way.endswith("dense"):
        policy.model.set_attn_implementation("sdpa")
    return lambda: learner.update(batch, 1, lambda done, planned: None).metrics


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batch = make_batch(args.rows, args.vocabulary, args.longest)
    tokens = int(batch.inputs.lengths.sum() + batch.decisions.sample.lengths.sum())
    updates = {way: update(way, optim, batch, make_policy(args.layers, args.vocabulary)) for way, optim in WAYS.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    efficiency: dict[str, float] = {}
    for _ in range(args.rounds):
        for way, run in updates.items():
            started = time.process_time()
            metrics = run()
            seconds[way].append(time.process_time() - started)
            efficiency[way] = metrics["packing_efficiency"]
    print("| way | tokens that are not padding | CPU seconds per update | tokens/s |")
    print("| --- | --- | --- | --- |")
    for way, taken in seconds.items():
        print(f"| {way} | {efficiency[way]:.2f} | {min(taken):.2f} | {tokens / min(taken):.0f} |")
    if args.out is not None:
        args.out.write_text(json.dumps({"tokens": tokens, "seconds": seconds, "efficiency": efficiency}, indent=2))


if __name__ == "__main__":
    main()
