"""A checkpoint or adapter folder of a language or vision-language model -> a policy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
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
from vlarl.policies.quantize import quantize_loaded
from vlarl.policies.value_head import ValueHead
from vlarl.policies.vlm.model import IMAGES_IN_ROWS, quiet
from vlarl.policies.vlm.policy import UNADAPTED, VALUE_HEAD, VlmPolicy
from vlarl.policies.vlm.processor import PromptProcessor, load_processor
from vlarl.policies.vlm.unread import random_instead, unread_model
from vlarl.policies.weight_files import load_state, read_tensors, weight_files

READERS = {  # architectures by what they read
    "images": frozenset(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()),
    "text": frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()),
}
MODEL_TYPES = frozenset({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})
ASSETS = (  # files of the tokenizer and processor, which are written as they were read
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "*.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)


def reads_images(config: Mapping[str, Any]) -> bool | None:
    """Whether the model of a config.json reads images, or text alone; None: it is not a model of this kind."""
    for architecture in config.get("architectures") or []:
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
    quantize: Literal[4, 8] | None = None,
    base: str | None = None,
    deferred: bool = False,
) -> VlmPolicy:
    """Read a checkpoint or adapter folder, or a hub id. No code of the folder runs, and no pickle is read.

    `base` is the base model of an adapter, if it has moved. On the device `meta` the policy has no weights and only
    processes prompts. `deferred` leaves the weights of the model on disk where they can stay there (unread.py).
    """
    folder = checkpoint_folder(path)
    adapter = folder if adapters.is_adapter(folder) else None
    origin_path, origin = (str(path), folder) if adapter is None else adapters.find_base(folder, base)
    has_weights = torch.device(device).type != "meta"
    if has_weights:
        for each in {folder, origin}:
            verify_checksums(each, lambda name: "/" not in name and name != TRAINER_FILE)
    unread = None
    if deferred and has_weights and quantize is None:
        empty = read_model(origin, dtype=dtype, attention=attention, has_weights=False)
        unread = unread_model(empty, origin, _auto_class(origin))
    model = unread or read_model(origin, dtype=dtype, attention=attention, has_weights=has_weights)
    linear_names = adapters.linear_names(model, UNADAPTED)
    if quantize is not None and has_weights:
        quantize_loaded(model, quantize, linear_names, device)
    has_images = bool(reads_images(read_object(origin / "config.json")))
    processor = PromptProcessor(
        load_processor(origin, model.config.model_type, has_images),
        reads_images=has_images,
        in_rows=model.config.model_type in IMAGES_IN_ROWS,
    )
    named_base = str(origin.resolve()) if Path(origin_path).expanduser().is_dir() else origin_path
    own_base = BaseCheckpoint(named_base, origin, adapters.fingerprint(origin))
    policy = VlmPolicy(cast(Any, model).to(device), processor, own_base, linear_names)
    policy.assets = _assets(origin)
    policy.training_data = training_data_of(folder) or TrainingData(unknown=(str(path),))
    if has_weights:
        with random_instead(model) if unread is not None else nullcontext():
            policy.access.check_logits()
    _load_value_head(policy, folder)
    if adapter is not None:
        policy.add_adapter_from(adapter)
    return policy.eval()


def read_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa",
    has_weights: bool = True,
) -> PreTrainedModel:
    """The model of a folder on the host, as transformers reads it; ValueError where weights are missing or don't fit.

    Without weights it is on the device `meta`: of the files only the headers are read, and the same is checked.
    """
    auto = _auto_class(folder)
    content = read_object(folder / "config.json")
    if content.get("quantization_config") is not None:
        raise ValueError("its weights are stored quantised: take the original ones, and set policy.quantize to 4 or 8")
    weight_files(folder)  # which names what is missing, and what to do about pickles
    with quiet():
        try:
            model, found = auto.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=attention,
                device_map=None if has_weights else "meta",
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # which are refused below
            )
        except ImportError as error:  # flash-attn is not installed
            raise ValueError(str(error)) from error
        except (RuntimeError, SafetensorError) as error:
            reason = "its weights can't be read: the files are damaged, or those of a model of other sizes"
            raise ValueError(f"{reason} ({' '.join(str(error).split())[:200]})") from error
    unfit = {
        "missing": sorted(found["missing_keys"]),
        "of another shape": [
            f"{name} {tuple(has)} for {tuple(wants)}" for name, has, wants in found["mismatched_keys"]
        ],
    }
    if problems := [f"{title} ({len(names)}): {', '.join(names)}" for title, names in unfit.items() if names]:
        raise ValueError(f"the weights of {folder} don't fit its config.json; {'; '.join(problems)}")
    return cast(PreTrainedModel, model)


def empty_model(folder: Path) -> PreTrainedModel:
    """The model of a folder without weights, whatever weights the folder holds."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with quiet(), torch.device("meta"):
        return cast(PreTrainedModel, _auto_class(folder).from_config(config, trust_remote_code=False))


def _auto_class(folder: Path) -> Any:
    """The class of transformers that reads a folder's model."""
    content = read_object(folder / "config.json")
    has_images = reads_images(content)
    if has_images is None:
        raise UsageError(
            f"{folder}: the architecture {content.get('architectures')} is neither a causal language model nor an "
            "image-text-to-text model of the installed transformers: use another model, or a newer transformers."
        )
    return AutoModelForImageTextToText if has_images else AutoModelForCausalLM


def _load_value_head(policy: VlmPolicy, folder: Path) -> None:
    file = folder / f"{VALUE_HEAD}.safetensors"
    if not file.is_file():
        return
    state = dict(read_tensors(file))
    widths = [len(state[name]) for name in sorted(state) if name.startswith("layers.") and name.endswith(".weight")]
    policy.value_head = ValueHead(policy.access.hidden_size, widths, 1)
    # Copied: a view of the mapped file lies at any address, products of matrices round by it, and resumed runs differ.
    copied = {name: tensor.to(policy.device, torch.float32, copy=True) for name, tensor in state.items()}
    load_state(policy.value_head, copied, str(folder))


def _assets(folder: Path) -> dict[str, bytes]:
    """Files beside the weights that are copied as they are."""
    return {file.name: file.read_bytes() for pattern in ASSETS for file in sorted(folder.glob(pattern))}
