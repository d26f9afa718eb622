"""Checkpoint folders in the original layout: read safetensors (whole or sharded) and OFT's component files; write
safetensors only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from vlarl.policies.openvla.config import read_json

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# Buffers that old versions of transformers stored and that the model computes by itself.
IGNORED = re.compile(r"rotary_emb\.inv_freq$")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, by the index where there is one."""
    if (folder / INDEX_NAME).is_file():
        weight_map = read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / INDEX_NAME} has no weight_map: copy the file again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        absent = [f.name for f in files if not f.is_file()]
        if absent:
            raise FileNotFoundError(f"{folder}: the index names {', '.join(absent)}, which are not there: copy them")
        return files
    if not (folder / WEIGHTS_NAME).is_file():
        raise FileNotFoundError(f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}: it holds no weights to load")
    return [folder / WEIGHTS_NAME]


def read_tensors(path: Path, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of one safetensors file, one at a time; a broken file is named."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict: it has no other iterator
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}): copy or download it again") from error


def load_model(model: nn.Module, folder: Path, dtype: torch.dtype, device: torch.device | str) -> None:
    """Fill a model, which may live on the meta device, with a folder's weights in the given type."""
    state: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in read_tensors(path, device):
            if not IGNORED.search(name):
                state[name] = tensor.to(dtype)
    load_state(model, state, str(folder))


def load_state(module: nn.Module, state: Mapping[str, torch.Tensor], source: str) -> None:
    """Put a whole state into a module; all names and shapes that don't fit are told at once."""
    wanted = module.state_dict()
    missing = [name for name in wanted if name not in state]
    unexpected = [name for name in state if name not in wanted]
    shapes = [
        f"{name} {tuple(state[name].shape)} for {tuple(wanted[name].shape)}"
        for name in wanted
        if name in state and state[name].shape != wanted[name].shape
    ]
    problems = [
        f"{title} ({len(names)}): {', '.join(names)}"
        for title, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    ]
    if problems:
        raise ValueError(f"the weights of {source} don't fit its config.json; {'; '.join(problems)}")
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    module.load_state_dict(dict(state), assign=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trainable)


def save_module(module: nn.Module, path: Path, dtype: torch.dtype | None = None) -> None:
    """Write a module's state as safetensors, in its own precision or another."""
    state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in module.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})


def read_component(folder: Path, name: str) -> dict[str, torch.Tensor] | None:
    """State of a component: our `<name>.safetensors`, or OFT's `<name>--<step>_checkpoint.pt` of the latest step."""
    ours = folder / f"{name}.safetensors"
    if ours.is_file():
        return dict(read_tensors(ours))
    found = {int(m[1]): p for p in folder.glob(f"{name}--*_checkpoint.pt") if (m := re.search(r"--(\d+)_", p.name))}
    if not found:
        return None
    path = found[max(found)]
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # what a broken pickle raises is anybody's guess
        raise ValueError(f"{path} is no file of tensors ({error}): copy or download it again") from error
    return {key.removeprefix("module."): tensor for key, tensor in state.items()}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object the way the original layout's files look."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
