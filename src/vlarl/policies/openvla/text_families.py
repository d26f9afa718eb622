"""The original code's conventions for each kind of language model: prompt, special ids, end of the action ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

QUESTION = "What action should the robot take to {instruction}?"
PLAIN_PROMPT = f"In: {QUESTION}\nOut:"
VICUNA_PROMPT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    f"The assistant gives helpful, detailed, and polite answers to the user's questions. USER: {QUESTION} ASSISTANT:"
)
QWEN_PROMPT = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)

LLAMA_EMPTY_TOKEN = 29871  # Llama's lone "▁": the original training data has it between "Out:" and the action
QWEN_TEXT_TOKENS = 151643  # Qwen2.5's vocabulary without its special tokens
QWEN_TOKENS = 151665  # and with them
QWEN_EXTRA_TOKENS = 256  # added to the tokenizer by MiniVLA, one for each bin


@dataclass(frozen=True)
class TextFamily:
    """The conventions of one `model_type`."""

    has_bos: bool  # without BOS the image tokens follow the prompt's first token, whichever it is
    prompt_suffix_id: int | None  # appended to the prompt by the original if absent
    pad_token_id: int
    stop_id: int


# The original appends Llama's empty token wherever the tokenizer is of Llama's class, and Mistral's is.
_LLAMA = TextFamily(has_bos=True, prompt_suffix_id=LLAMA_EMPTY_TOKEN, pad_token_id=32000, stop_id=2)
FAMILIES: dict[str, TextFamily] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": TextFamily(has_bos=False, prompt_suffix_id=None, pad_token_id=151643, stop_id=151645),
}


def model_type(raw: Mapping[str, Any]) -> str:
    """The language model's kind: from `text_config`, else from Prismatic's `llm_backbone_id`."""
    backbone = str(raw.get("llm_backbone_id", ""))
    named = {"mistral": "mistral", "qwen": "qwen2", "phi": "phi"}
    guess = next((kind for start, kind in named.items() if backbone.startswith(start)), "llama")
    kind = str(raw["text_config"].get("model_type", guess))
    if kind not in FAMILIES:
        raise ValueError(f"text_config: model_type {kind!r} is not supported; known are {', '.join(FAMILIES)}")
    return kind


def prompt_template(raw: Mapping[str, Any], kind: str) -> str:
    """The text around `{instruction}` that the original code builds for a checkpoint."""
    if kind == "qwen2":
        return QWEN_PROMPT
    return VICUNA_PROMPT if str(raw.get("llm_backbone_id", "")).startswith("vicuna") else PLAIN_PROMPT


def action_end(raw: Mapping[str, Any], kind: str, padded_vocab_size: int, pad_to_multiple_of: int) -> int:
    """One more than the highest action id.

    Llama's and Mistral's embeddings grew by exactly `pad_to_multiple_of` rows, so subtracting them gives the
    tokenizer's own vocabulary, whose last ids are the action ids. Qwen2.5's embedding always had spare rows, so its
    tokenizer's size is hard-coded: MiniVLA (`llm_backbone_id` ending in -extra) adds 256 tokens after the special ones
    and uses those as action ids, 151665..151920; plain Qwen2.5 uses the last text tokens, 151387..151642.
    """
    if kind != "qwen2":
        return padded_vocab_size - pad_to_multiple_of
    extra = str(raw.get("llm_backbone_id", "")).endswith("-extra")
    return QWEN_TOKENS + QWEN_EXTRA_TOKENS if extra else QWEN_TEXT_TOKENS
