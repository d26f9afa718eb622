"""A checkpoint or adapter folder of a language or vision-language model -> a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from vlarl.config.training_data import TrainingData, training_data_of
from vlarl.errors import UsageError
from vlarl.json_files import read_object
from vlarl.policies import adapters
from vlarl.policies.base import BaseCheckpoint
from vlarl.policies.checksums import TRAINER_FILE, verify_checksums
from vlarl.policies.locate import checkpoint_folder
from vlarl.policies.value_head import ValueHead
from vlarl.policies.vlm.model import IMAGES_IN_ROWS
from vlarl.policies.vlm.policy import VALUE_HEAD, VlmPolicy
from vlarl.policies.vlm.processor import PromptProcessor, load_processor
from vlarl.policies.weight_files import load_state, read_tensors

READERS = {  # architectures by what they read
    "images": frozenset(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()),
    "text": frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()),
}
ASSETS = (  # files of the tokenizer and processor, which are written as they were read
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "*.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)


def reads_images(folder: Path) -> bool | None:
    """Whether the folder's model reads images, or text alone; None: it is not a model of this kind."""
    named = read_object(folder / "config.json").get("architectures") or []
    for architecture in named:
        for what, known in READERS.items():
            if architecture in known:
                return what == "images"
    return None


def read_policy(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa",
    base: str | None = None,
    system_prompt: str | None = None,
) -> VlmPolicy:
    """Read a checkpoint or adapter folder, or a hub id. No code of the folder runs, and no pickle is read.

    `base` is the base model of an adapter, if it has moved. `system_prompt` is given to prompts that have none. On the
    device `meta` the policy has no weights and only processes prompts.
    """
    folder = checkpoint_folder(path)
    adapter = folder if adapters.is_adapter(folder) else None
    origin_path = str(path) if adapter is None else base or adapters.base_of(folder)
    origin = folder if adapter is None else checkpoint_folder(origin_path)
    has_images = reads_images(origin)
    if has_images is None:
        named = read_object(origin / "config.json").get("architectures")
        raise UsageError(
            f"{origin}: the architecture {named} is neither a causal language model nor an image-text-to-text model of "
            "the installed transformers: use another model, or a newer transformers."
        )
    config = AutoConfig.from_pretrained(origin, trust_remote_code=False)
    auto = cast(Any, AutoModelForImageTextToText if has_images else AutoModelForCausalLM)
    has_weights = torch.device(device).type != "meta"
    if has_weights:
        for each in {folder, origin}:
            verify_checksums(each, lambda name: "/" not in name and name != TRAINER_FILE)
        model = auto.from_pretrained(
            origin, dtype=dtype, attn_implementation=attention, use_safetensors=True, trust_remote_code=False
        )
    else:
        with torch.device("meta"):
            model = auto.from_config(config, trust_remote_code=False)
    processor = PromptProcessor(
        load_processor(origin, config.model_type, has_images),
        reads_images=has_images,
        in_rows=config.model_type in IMAGES_IN_ROWS,
        system_prompt=system_prompt,
    )
    named_base = str(origin.resolve()) if Path(origin_path).expanduser().is_dir() else origin_path
    policy = VlmPolicy(model.to(device), processor, BaseCheckpoint(named_base, origin, adapters.fingerprint(origin)))
    policy.assets = _assets(origin)
    policy.training_data = training_data_of(folder) or TrainingData(unknown=(str(path),))
    if not has_weights:
        return policy.eval()
    policy.access.check_logits()
    _load_value_head(policy, folder)
    if adapter is not None:
        policy.add_adapter_from(adapter)
    return policy.eval()


def _load_value_head(policy: VlmPolicy, folder: Path) -> None:
    file = folder / f"{VALUE_HEAD}.safetensors"
    if not file.is_file():
        return
    state = dict(read_tensors(file))
    widths = [len(state[name]) for name in sorted(state) if name.startswith("layers.") and name.endswith(".weight")]
    policy.value_head = ValueHead(policy.access.hidden_size, widths, 1)
    load_state(policy.value_head, {k: v.to(policy.device, torch.float32) for k, v in state.items()}, str(folder))


def _assets(folder: Path) -> dict[str, bytes]:
    """Files beside the weights that are copied as they are."""
    return {file.name: file.read_bytes() for pattern in ASSETS for file in sorted(folder.glob(pattern))}
