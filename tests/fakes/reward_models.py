"""Tiny reward models with random weights, saved as Hugging Face folders: nothing is downloaded."""

from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)

from vlarl.policies.tiny_inputs import build_tiny_tokenizer

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def save_tokenizer(folder: Path, **special: str) -> None:
    special = special or {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=build_tiny_tokenizer(), **special).save_pretrained(folder)


def save_classifier(folder: Path, num_labels: int = 1, positions: int = 512) -> Path:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1024,
        max_position_embeddings=positions,
        num_labels=num_labels,
        pad_token_id=3,
        initializer_range=0.5,
        **SIZES,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_language_model(folder: Path) -> Path:
    BertForMaskedLM(BertConfig(vocab_size=64, **SIZES)).save_pretrained(folder)
    return folder


def save_clip(folder: Path) -> Path:
    torch.manual_seed(0)
    text = {"vocab_size": 1024, "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    vision = {"image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config=text | SIZES, vision_config=vision | SIZES, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_siglip(folder: Path) -> Path:
    torch.manual_seed(0)
    text = {"vocab_size": 1024, "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config = SiglipConfig(text_config=text | SIZES, vision_config={"image_size": 16, "patch_size": 8} | SIZES)
    SiglipModel(config).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
