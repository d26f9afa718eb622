"""Adapter folders, and operations on a model's adapters, without importing peft, which takes seconds.

An adapter folder has peft's format (`adapter_config.json`, `adapter_model.safetensors`) with the names of the original
code's adapters, and `base.json`, which identifies the weights it was trained on. lora.py adds adapters to a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from vlarl.errors import UsageError
from vlarl.policies.checkpoint_json import read_json
from vlarl.policies.locate import checkpoint_folder
from vlarl.policies.weight_files import opened, weight_files

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
BASE_NAME = "base.json"
WIDTH_STEP = 8  # an adapter's columns in an operand, 16 bytes of bfloat16, are padded to a multiple of this
SAMPLED_VALUES = 16  # of each tensor, for the fingerprint


def remove(folder: Path) -> None:
    """Delete an adapter's files from a folder that a whole model was written to."""
    for name in (CONFIG_NAME, WEIGHTS_NAME, BASE_NAME):
        (folder / name).unlink(missing_ok=True)


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter."""
    return (folder / CONFIG_NAME).is_file()


def base_of(folder: Path) -> str:
    """The path or hub id of the model that an adapter folder says it was trained on."""
    base = read_json(folder / CONFIG_NAME).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{folder / CONFIG_NAME} does not name its base model: say which one it is (base)")
    return str(base)


def find_base(adapter: Path, given: str | None) -> tuple[str, Path]:
    """The name and the folder of an adapter's base model: the one given, else the one that the adapter names."""
    path = given or base_of(adapter)
    try:
        return path, checkpoint_folder(path)
    except UsageError as error:
        message = f"the adapter {adapter} was trained on {path}, which can't be loaded; say where it is. {error}"
        raise UsageError(message) from error


def fingerprint(folder: Path) -> str:
    """Identifies a folder's weights, whatever their shards and precision: a hash of names, shapes and a few values."""
    lines = []
    for path in weight_files(folder):
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict: it has no other iterator
                part = file.get_slice(name)
                shape = part.get_shape()
                values = part[:1] if shape else file.get_tensor(name)
                sample = values.flatten()[:SAMPLED_VALUES].to(torch.bfloat16).float().tolist()
                lines.append(f"{name} {shape} {sample}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def check_base(folder: Path, base: str, found: str) -> None:
    """Refuse a base whose weights are not those that the adapter was trained on, if its folder records them."""
    if not (folder / BASE_NAME).is_file():
        return
    recorded = read_json(folder / BASE_NAME)
    if recorded.get("fingerprint") != found:
        raise ValueError(
            f"the adapter {folder} was trained on {recorded.get('base')} (fingerprint {recorded.get('fingerprint')}), "
            f"but {base} holds other weights (fingerprint {found}): give the base it was trained on"
        )


def linear_names(model: nn.Module, unadapted: tuple[str, ...]) -> tuple[str, ...]:
    """The trainable linear layers except those whose names end in one of `unadapted`: what `all-linear` means."""
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad and not name.endswith(unadapted)
    )


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that have an adapter, by name: peft's layers, recognized by their attributes."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def settings(model: nn.Module) -> dict[str, object]:
    """Rank, scale and layers of a model's adapters."""
    config = cast(Any, model).peft_config["default"]  # where peft keeps it
    targets = sorted(config.target_modules or ())
    return {"rank": config.r, "alpha": config.lora_alpha, "dropout": config.lora_dropout, "target_modules": targets}


@torch.no_grad()
def fraction_kept(model: nn.Module, dtype: torch.dtype) -> float:
    """The fraction of the adapters' weights that survives merging them into the model's own in this type.

    1 is all of it. A low-precision type can't represent a weight plus a relatively small change: bfloat16 mostly rounds
    away a change below about 1/400 of its weight.
    """
    kept = whole = 0.0
    for layer in lora_layers(model).values():
        weight, delta = layer.get_base_layer().weight.float(), layer.get_delta_weight("default").float()
        change = (weight + delta).to(dtype).float() - weight.to(dtype).float()
        kept += float((change.double() * delta).sum())
        whole += float(delta.double().square().sum())
    return kept / whole if whole > 0 else 1.0


@torch.no_grad()
def fold(model: nn.Module) -> None:
    """Add the adapters to their layers, in float32, and remove them: what remains is a plain model."""
    for name, layer in lora_layers(model).items():
        plain = layer.get_base_layer()
        whole = plain.weight.float() + layer.get_delta_weight("default").float()
        plain.weight = nn.Parameter(whole.to(plain.weight.dtype), requires_grad=False)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, plain)
    del model.peft_config


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes as if it had no adapters; they are active again afterwards."""
    layers = lora_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def reset(model: nn.Module, seed: int) -> None:
    """Reset all adapters to their initial values, as `lora.add_fresh` creates them."""
    with seeded(model, seed):
        for layer in lora_layers(model).values():
            layer.reset_lora_parameters("default", True)


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Seed the random generators inside the block; afterwards the process's own continue as if nothing was sampled."""
    devices = range(torch.cuda.device_count()) if next(model.parameters()).is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
