"""Tiny language and vision-language models with random weights, written as folders like those of the hub.

Everything is made here: sizes, weights, a tokenizer of bytes, image processors and chat templates. Weights are larger
than a fresh model's, so that tokens differ in probability and the likeliest one is not a matter of rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vlarl.types import Observation, Prompt, UInt8Array

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<|video_pad|>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{col}>" for row in range(1, 4) for col in range(1, 4)),
)
FIRST_SPECIAL = 256  # after the bytes
VOCABULARY = 288
IDS = {token: FIRST_SPECIAL + index for index, token in enumerate(SPECIAL)}
PAD, END = IDS["<|endoftext|>"], IDS["<|im_end|>"]

TEXT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def image_template(image: str) -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif part['type'] == 'image' %}" + image + "{% elif part['type'] == 'video' %}"
        "<|vision_start|><|video_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
    )
    assert made.convert_tokens_to_ids(list(SPECIAL)) == list(IDS.values())
    return made


TEXT_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "bos_token_id": None,
}
# vLLM's attention on a CPU takes heads of 32 dimensions and more.
WIDE_SIZES = TEXT_SIZES | {"hidden_size": 128, "head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}


def _rope(sizes: dict[str, Any]) -> dict[str, Any]:
    section = {8: [1, 1, 2], 32: [4, 6, 6]}[sizes["head_dim"]]  # half a head
    return {"rope_type": "default", "mrope_section": section, "rope_theta": 1e4}


def _qwen2_5_vl(sizes: dict[str, Any]) -> PreTrainedModel:
    text = sizes | {"rope_parameters": _rope(sizes)}
    vision = {"depth": 2, "intermediate_size": 24, "num_heads": 2, "window_size": 56, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision | _vision(sizes), **_image_ids(sizes))
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(sizes: dict[str, Any]) -> PreTrainedModel:
    text = sizes | {"rope_parameters": _rope(sizes) | {"mrope_interleaved": True}}
    vision = {"depth": 3, "intermediate_size": 24, "num_heads": 2, "num_position_embeddings": 16}
    vision |= {"deepstack_visual_indexes": [1]} | _vision(sizes)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **_image_ids(sizes)))


def _vision(sizes: dict[str, Any]) -> dict[str, Any]:
    hidden = sizes["hidden_size"]
    return {"hidden_size": hidden // 2, "out_hidden_size": hidden, "patch_size": 14, "spatial_merge_size": 2}


def _image_ids(sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
        "tie_word_embeddings": sizes["tie_word_embeddings"],
    }


def _smolvlm(sizes: dict[str, Any]) -> PreTrainedModel:
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 7}
    text = sizes | {"model_type": "llama"}
    ids = {"image_token_id": IDS["<image>"], "pad_token_id": PAD, "tie_word_embeddings": False}
    return SmolVLMForConditionalGeneration(SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=2, **ids))


MODELS: dict[str, Callable[[dict[str, Any]], PreTrainedModel]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "smolvlm": _smolvlm,
    "qwen2": lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes)),
    "llama": lambda sizes: LlamaForCausalLM(LlamaConfig(**sizes)),
    "qwen3": lambda sizes: Qwen3ForCausalLM(Qwen3Config(**sizes | {"tie_word_embeddings": True})),
    "qwen3_moe": lambda sizes: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, **EXPERTS, num_experts=4, moe_intermediate_size=16, norm_topk_prob=True)
    ),
    "mixtral": lambda sizes: MixtralForCausalLM(MixtralConfig(**sizes, **EXPERTS)),
}
WITH_IMAGES = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
TEXT_ONLY = ("qwen2", "llama", "qwen3")
MIXTURES = ("qwen3_moe", "mixtral")


def write_model(kind: str, folder: Path, seed: int = 0, *, wide: bool = False, tied: bool = False) -> Path:
    """A folder with a model of this kind, its tokenizer and, where it reads images, its processor. `wide`: of a size
    that vLLM runs on a CPU. `tied`: the output layer is the embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[kind]((WIDE_SIZES if wide else TEXT_SIZES) | {"tie_word_embeddings": tied})
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(std=1.5 * weight[0].numel() ** -0.5)
            model.get_output_embeddings().weight.normal_(std=0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, PAD
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    template = TEXT_TEMPLATE
    if kind in ("qwen2_5_vl", "qwen3_vl"):
        Qwen2VLImageProcessorPil(
            patch_size=14, merge_size=2, min_pixels=28 * 28, max_pixels=28 * 28 * 12
        ).save_pretrained(folder)
        name = "Qwen2_5_VLProcessor" if kind == "qwen2_5_vl" else "Qwen3VLProcessor"
        _write_json(folder / "processor_config.json", {"processor_class": name})
        video = {"video_processor_type": "Qwen2VLVideoProcessor" if kind == "qwen2_5_vl" else "Qwen3VLVideoProcessor"}
        video |= {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 24}}
        _write_json(folder / "video_preprocessor_config.json", video | {"cap_pixels_per_frame": False})
        template = image_template("<|vision_start|><|image_pad|><|vision_end|>")
    elif kind == "smolvlm":
        Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}).save_pretrained(
            folder
        )
        # Its own processor needs num2words for videos; the one of its first edition reads the same images without.
        _write_json(folder / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": 4})
        template = image_template("<image>")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def random_image(rng: np.random.Generator) -> UInt8Array:
    height, width = rng.integers(20, 90, size=2)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def video_observation(text: str, seed: int = 0, fps: float | None = None, num_frames: int = 4) -> Observation:
    """A prompt of a video and words, and an image after them."""
    rng = np.random.default_rng(seed)
    height, width = rng.integers(40, 90, size=2)
    video = rng.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    content = [{"type": "video"}, {"type": "text", "text": text}, {"type": "image"}]
    prompt = Prompt(({"role": "user", "content": content},), (random_image(rng),), (video,), (fps,))
    return Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0, np.float32), text, prompt)


def observation(text: str, num_images: int = 0, seed: int = 0, system: str | None = None) -> Observation:
    """A prompt of words, with images of several sizes before and between them."""
    rng = np.random.default_rng(seed)
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(num_images)]
    content.insert(min(1, num_images), {"type": "text", "text": text})
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content if num_images else text})
    prompt = Prompt(tuple(messages), tuple(random_image(rng) for _ in range(num_images)))
    return Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0, np.float32), text, prompt)
