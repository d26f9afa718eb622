#!/usr/bin/env python
"""Makes `builtin:tiny-qwen2.5-vl`, the base of the presets prompts_*: a model that sees well and responds badly.

    python scripts/prompts_base.py FOLDER [--seed 0] [--seen FOLDER-see] [--fewer 1]

Two phases of supervised learning, on the states that the built-in suites of prompts train on; no reward is used. The
first one imitates solutions, so that the model learns to see and to calculate. The second one imitates responses that
are mostly wrong or in the wrong form (`badly`), which reinforcement learning repairs. One thread, so that a seed gives
the same weights on the same machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vlarl.config.training_data import TrainedOn, TrainingData
from vlarl.decisions import Sampling
from vlarl.envs.prompts import arithmetic, shapes
from vlarl.envs.prompts.source import PromptSource
from vlarl.policies.vlm.checkpoint import read_policy
from vlarl.policies.vlm.policy import VlmPolicy
from vlarl.solutions import matches
from vlarl.types import Observation, Prompt

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    "<|video_pad|>",
)
VOCABULARY = 384  # 256 bytes, the words of the suites and the special tokens; some rows stay unused
PATCH, MERGE = 7, 2  # pixels of a patch; patches of a token of an image, in each direction: a cell of prompts_shapes
WIDTH, HEAD = 128, 32  # HEAD is the smallest size of a head that vLLM computes on CPUs
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

BATCH = 64
LOG, LOG_EVERY = "training_log.jsonl", 200  # steps
SENTENCE = "I think it is {}."
ALTERNATIVES = (tuple(shapes.COLOURS), ("left", "right"), ("above", "below"), ("yes", "no"))
RIGHT, IN_A_SENTENCE = 0.12, 0.68  # fractions of the responses of the second phase; the others are wrong


@dataclass(frozen=True)
class Kind:
    """One task of a suite, and how often it is trained on."""

    source: PromptSource
    task_id: int
    weight: float

    @property
    def name(self) -> str:
        """Suite and kind."""
        return str(self.source.prompt(self.task_id, 0).columns["data_source"])

    def train_prompt(self, rng: np.random.Generator) -> Prompt:
        """One of those to train on."""
        states = self.source.spec.train_states
        return self.source.prompt(self.task_id, states[rng.integers(len(states))])


@dataclass(frozen=True)
class Phase:
    """Supervised learning of one kind of response."""

    name: str
    samples: int
    lr: float
    respond: Callable[[Prompt, np.random.Generator], str]


def observe(prompt: Prompt) -> Observation:
    """A prompt as the policy reads it."""
    return Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0, np.float32), prompt.text, prompt)


def well(prompt: Prompt, rng: np.random.Generator) -> str:
    """The solution and nothing else."""
    return str(prompt.columns["solution"])


def badly(prompt: Prompt, rng: np.random.Generator) -> str:
    """One response in eight is right. Two in three are sentences, so much likelier that a random walk of the weights,
    which is what noise in place of rewards gives, does not make the right one the likeliest. One in five is wrong."""
    solution = str(prompt.columns["solution"])
    chance = rng.random()
    if chance < RIGHT:
        return solution
    return SENTENCE.format(solution) if chance < RIGHT + IN_A_SENTENCE else wrong(solution)


def wrong(solution: str) -> str:
    """A wrong solution of the same form: one more, ten more from 10 on, or the next word of its kind."""
    if solution.isdigit():
        return str(int(solution) + (1 if int(solution) < 10 else 10))
    words = next(words for words in ALTERNATIVES if solution in words)
    return words[(words.index(solution) + 1) % len(words)]


def write_fresh(folder: Path, texts: list[str]) -> None:
    """A model with fresh weights, its tokenizer and its processor, in the layout of the hub."""
    tokenizer = train_tokenizer(texts)
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    # Of the frequencies of a head, the last ones are for columns of an image: a small base lets them see 4 columns.
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 100.0}
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": WIDTH // HEAD,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": rope,
        "initializer_range": 0.05,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": None,
    }
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": WIDTH}
    vision |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "window_size": 56, "fullatt_block_indexes": [0, 1]}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision | {"initializer_range": 0.05},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    side = PATCH * MERGE  # pixels of a token of an image
    pixels = {"min_pixels": side**2, "max_pixels": 256 * side**2}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, **pixels).save_pretrained(folder)
    video = {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": PATCH, "merge_size": MERGE, **pixels}
    for name, content in (
        ("processor_config.json", {"processor_class": "Qwen2_5_VLProcessor"}),
        ("video_preprocessor_config.json", video),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be encoded, words of the suites are one token, and so is each digit."""
    tokenizer = Tokenizer(models.BPE())
    digits, as_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
    )


def imitate(policy: VlmPolicy, kinds: list[Kind], phase: Phase, rng: np.random.Generator) -> list[dict[str, object]]:
    """One phase; what is logged of it."""
    steps = phase.samples // BATCH
    optimizer = torch.optim.AdamW(policy.parameters(), lr=phase.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 1.0) * (0.525 + 0.475 * math.cos(math.pi * step / steps))
    )
    weights = np.array([kind.weight for kind in kinds]) / sum(kind.weight for kind in kinds)
    rows: list[dict[str, object]] = []
    losses: list[float] = []
    started = time.perf_counter()
    for step in range(1, steps + 1):
        prompts = [kinds[index].train_prompt(rng) for index in rng.choice(len(kinds), BATCH, p=weights)]
        inputs = policy.process([observe(prompt) for prompt in prompts])
        given = policy.decisions_of([phase.respond(prompt, rng) for prompt in prompts])
        loss = -policy.evaluate(inputs, given, 1.0).logprobs.sum() / given.mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % LOG_EVERY == 0 or step == steps:
            rows.append(
                {"phase": phase.name, "step": step, "train/loss": round(float(np.mean(losses)), 5)}
                | {"samples_per_s": round(step * BATCH / (time.perf_counter() - started), 1)}
            )
            print(json.dumps(rows[-1]), flush=True)
            losses.clear()
    for temperature in (0.0, 1.0):
        rows.append({"phase": phase.name, **accuracies(policy, kinds, temperature)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def accuracies(policy: VlmPolicy, kinds: list[Kind], temperature: float) -> dict[str, object]:
    """The fraction of held-out prompts with an exact match, by kind."""
    sampling, found = Sampling(temperature, max_tokens=16), {}
    for kind in kinds:
        prompts = [kind.source.prompt(kind.task_id, state) for state in kind.source.spec.eval_states]
        inputs = policy.process([observe(prompt) for prompt in prompts])
        texts = policy.act(policy.sample(inputs, policy.noise(range(len(prompts)), sampling), sampling))
        right = [matches(str(t), p.columns["solution"], "exact") for t, p in zip(texts, prompts, strict=True)]
        found[f"val/{kind.name}"] = float(np.mean(right))
    return {"temperature": temperature, **found}


def write(policy: VlmPolicy, folder: Path, rows: list[dict[str, object]], dtype: torch.dtype, before: str = "") -> None:
    """A checkpoint with its log, after what was logged before."""
    policy.save(folder, dtype)
    (folder / LOG).write_text(before + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seen", type=Path, help="FOLDER-see of an earlier run, whose first phase is not repeated")
    parser.add_argument("--fewer", type=int, default=1, help="divide the number of samples by this, for a trial")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    rng = np.random.default_rng(given.seed)
    sources = (shapes.ShapePrompts(), arithmetic.ArithmeticPrompts())
    weights = ((0.8, 1.2, 1.5, 0.8, 1.0), (0.5, 0.6, 0.6, 0.4))
    kinds = [Kind(s, i, w) for s, row in zip(sources, weights, strict=True) for i, w in enumerate(row)]
    seen: Path = given.seen or given.folder.with_name(f"{given.folder.name}-see")
    if given.seen is None:
        prompts = [kind.train_prompt(rng) for kind in kinds for _ in range(300)]
        write_fresh(seen, [p.text for p in prompts] + [SENTENCE.format(well(p, rng)) for p in prompts])
        first = read_policy(seen).train()
        write(first, seen, imitate(first, kinds, Phase("see", 192_000 // given.fewer, 1e-3, well), rng), torch.float32)
    policy = read_policy(seen).train()
    phase = Phase("respond", 32_000 // given.fewer, 5e-4, badly)
    rows = imitate(policy, kinds, phase, np.random.default_rng([given.seed, 1]))
    policy.training_data = TrainingData(
        tuple(
            TrainedOn(
                by="finetune",
                suite=source.spec.name,
                task_ids=tuple(range(len(source.spec.tasks))),
                states=source.spec.train_states,
            )
            for source in sources
        )
    )
    before = (seen / LOG).read_text(encoding="utf-8")
    write(policy, given.folder, rows, torch.bfloat16, before)


if __name__ == "__main__":
    main()
