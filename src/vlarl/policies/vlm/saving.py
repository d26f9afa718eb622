"""A transformers model written in the original layout: names of weights and config.json as the library has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from vlarl.json_files import read_object
from vlarl.policies.checkpoint_json import write_json
from vlarl.policies.vlm.model import quiet


def save_model(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Write weights, in shards of at most so many bytes, and config.json; `dtype` converts floating-point weights,
    which otherwise stay as they are."""
    for old in folder.glob("model*.safetensors*"):
        old.unlink()  # shards of other weights
    state = None if dtype is None else _converted(model, dtype)
    with quiet():
        model.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_bytes)
    if dtype is None:
        return
    config = read_object(folder / "config.json")
    _name_dtype(config, str(dtype).removeprefix("torch."))  # the library loads a model in the type that is named there
    write_json(folder / "config.json", config)


def _converted(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state in another type; tensors in the same memory stay so, or tied weights would be written twice."""
    known: dict[tuple[int, torch.Size], torch.Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        known.setdefault(key, tensor.to(dtype) if tensor.is_floating_point() else tensor)
        state[name] = known[key]
    return state


def _name_dtype(config: dict[str, Any], name: str) -> None:
    if "dtype" in config:
        config["dtype"] = name
    for part in config.values():
        if isinstance(part, dict):
            _name_dtype(part, name)
