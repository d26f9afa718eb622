"""What is trained, as tensors by name: weights, optimizer state and random states, to a checkpoint and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from vlarl.errors import DivergedError
from vlarl.training.fsdp import part_like
from vlarl.training.random_states import Generator, own_keys
from vlarl.training.ranks import Ranks
from vlarl.training.shards import OPTIMIZER, WEIGHTS, read_shards, stored_shapes

Entry = TypeVar("Entry")
Trained = tuple[str, torch.nn.Parameter, torch.optim.Optimizer]
"""A parameter that is trained: its name, and its optimizer."""

TENSORS = "trainer.safetensors"
LARGEST_WEIGHT = 1e6  # beyond it training has diverged, even if the weights are finite


def trained_tensors(trained: Iterable[Trained]) -> dict[str, torch.Tensor]:
    """All weights that an optimizer updates, by key."""
    return {f"{WEIGHTS}.{name}": parameter.detach() for name, parameter, _ in trained}


def optimizer_tensors(trained: Iterable[Trained]) -> dict[str, torch.Tensor]:
    """Optimizer state by parameter name."""
    tensors = {}
    for name, parameter, optimizer in trained:
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{OPTIMIZER}.{name}.{key}"] = value
    return tensors


def restore_optimizers(trained: Iterable[Trained], tensors: dict[str, torch.Tensor]) -> None:
    """Restore optimizer state that `optimizer_tensors` returned; ValueError if it does not fit the parameters."""
    found = {name: (parameter, optimizer) for name, parameter, optimizer in trained}
    stored = with_prefix(tensors, OPTIMIZER)
    _check_optimizer_state(stored, {name: parameter for name, (parameter, _) in found.items()})
    for full_name, tensor in stored.items():
        name, _, key = full_name.rpartition(".")
        parameter, optimizer = found[name]
        optimizer.state[parameter][key] = part_like(tensor, parameter)


def restore_shards(
    named_trained: Iterable[Trained],
    more: Mapping[str, torch.Tensor],
    folder: Path,
    own: Mapping[str, Generator],
    ranks: Ranks,
) -> dict[str, torch.Tensor]:
    """Fill weights and optimizer state, or this rank's parts of them, and `more` tensors by their keys from a
    checkpoint in parts; returns the random states of this rank by key."""
    named, shapes = list(named_trained), stored_shapes(folder)
    keys = own_keys(own, ranks.rank, shapes).values()
    states = {key: torch.zeros(shapes[key], dtype=torch.uint8) for key in keys}
    trained = {name: (parameter, optimizer) for name, parameter, optimizer in named}
    into = states | dict(more) | trained_tensors(named)
    for full_name, shape in with_prefix(shapes, OPTIMIZER).items():
        name, _, key = full_name.rpartition(".")
        parameter, optimizer = trained[name]
        fresh = torch.zeros_like(parameter.detach()) if shape else torch.zeros((), device=parameter.device)
        optimizer.state[parameter][key] = into[f"{OPTIMIZER}.{full_name}"] = fresh
    read_shards(into, folder, ranks)
    return states


def stored_states(
    own: Mapping[str, Generator], rank: int, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A rank's random states by key; ValueError if they don't fit its generators."""
    keys = own_keys(own, rank, tensors)
    for kind, key in keys.items():
        _check_like(f"{TENSORS}: {key}", tensors[key], own[kind].get_state())
    return {key: tensors[key] for key in keys.values()}


def _check_optimizer_state(stored: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]) -> None:
    """Refuse optimizer state whose shape or type differs from its parameter's, or of which a part is missing."""
    found: dict[str, set[str]] = {}
    for full_name, tensor in stored.items():
        name, _, key = full_name.rpartition(".")
        if name not in trained:
            raise ValueError(f"{TENSORS} holds optimizer state of {name}, which this run does not train")
        found.setdefault(name, set()).add(key)
        _check_like(f"{TENSORS}: {OPTIMIZER}.{full_name}", tensor, torch.zeros(()) if key == "step" else trained[name])
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{TENSORS}: {OPTIMIZER}.{full_name} holds NaN or infinity")
    keys = set().union(*found.values())
    if partial := [name for name, held in found.items() if held != keys]:
        lacks = ", ".join(sorted(keys - found[partial[0]]))
        raise ValueError(f"{TENSORS} lacks {lacks} of {partial[0]}")


def _check_like(name: str, tensor: torch.Tensor, example: torch.Tensor) -> None:
    if tensor.shape != example.shape or tensor.dtype != example.dtype:
        had, wanted = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (tensor, example))
        raise ValueError(f"{name} is {had}, and this run needs {wanted}")


@torch.no_grad()
def fill(own: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    """Copy stored weights into those of the same names; ValueError if one is missing or of another shape."""
    for name, tensor in own.items():
        if name not in stored:
            raise ValueError(f"{name} is missing")
        if stored[name].shape != tensor.shape or not stored[name].is_floating_point():
            _check_like(name, stored[name], tensor)
        tensor.copy_(part_like(stored[name], tensor))


def with_prefix(entries: dict[str, Entry], prefix: str) -> dict[str, Entry]:
    """The entries whose names begin with a prefix, without it."""
    return {key.removeprefix(f"{prefix}."): e for key, e in entries.items() if key.startswith(f"{prefix}.")}


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as a file holds them."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def weight_fault(parameter: torch.Tensor) -> str:
    """What is wrong with weights that have diverged; empty if nothing is."""
    local = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
    if local.numel() == 0:
        return ""
    largest = max(abs(float(value)) for value in torch.aminmax(local))
    if not math.isfinite(largest):  # a NaN anywhere makes both ends NaN
        return "not finite"
    return f"absurd, up to {largest:.0e}" if largest > LARGEST_WEIGHT else ""


def refuse_diverged(trained: Iterable[Trained], lr: float, folder: Path, ranks: Ranks) -> None:
    """Refuse weights that are not finite, or absurdly large. All ranks must call: each checks its own parts."""
    faults = ((name, weight_fault(parameter)) for name, parameter, _ in trained)
    name, fault = next(((name, fault) for name, fault in faults if fault), ("", ""))
    if ranks.any(bool(fault)):
        raise DivergedError(
            f"the weights are {fault or 'not finite or absurd'} ({name or 'on another rank'}), so they are not saved; "
            f"earlier checkpoints are in {folder}. Lower optim.lr (now {lr}) and resume."
        )
