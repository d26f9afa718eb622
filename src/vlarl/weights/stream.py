"""What a weight sync sends: the trained weights of a policy, by the names that engines know them by, one at a time.

    policy ─► weights_to_send ─► WeightStream ─► buckets of bytes, or NCCL ─► WeightReceiver of each engine

An engine starts from the checkpoint that the learner started from, so frozen weights are never sent. Adapters are sent
as adapters, in float32: added to a bfloat16 weight, most of an early update would be rounded away.

An engine loads whole layers (vLLM keeps q, k and v as one matrix, and fills a layer only when all of it has arrived),
so tensors are sent in groups: all tensors of a group, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from vlarl.errors import UsageError
from vlarl.policies.base import Policy

# Projections of a transformer layer that vLLM keeps as one matrix.
PACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
PACKED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


@dataclass(frozen=True)
class WeightStream:
    """Weights by name; every iteration makes the tensors again, one at a time."""

    shapes: Mapping[str, tuple[int, ...]]  # in the order of the iteration
    make: Callable[[str], torch.Tensor]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.make(name)) for name in self.shapes)


def is_adapter_weight(name: str) -> bool:
    """Whether a weight belongs to a LoRA adapter, by the names that peft gives them."""
    return ".lora_" in name


def group_of(name: str) -> str:
    """What an engine loads as a whole: a layer, with the parts of packed matrices together; or one tensor of an
    adapter."""
    if is_adapter_weight(name):
        return name
    layer = name.rpartition(".")[0]
    parent, dot, projection = layer.rpartition(".")
    return f"{parent}{dot}{PACKED[projection]}" if projection in PACKED else layer


def weights_to_send(policy: Policy, dtype: torch.dtype | None = None) -> WeightStream:
    """The weights that training changes, with the rest of their layers, in the engine's type, but for units that stay
    in float32; and all adapters as they are, also frozen ones, which an engine that starts from the base does not have.

    Shards (FSDP's DTensors) are gathered one tensor at a time, so every rank has to iterate.
    """
    weights = policy.engine_weights()
    changed = {group_of(name) for name, weight in weights.items() if weight.requires_grad or is_adapter_weight(name)}
    sent = {name: weight for name, weight in weights.items() if group_of(name) in changed}
    units = [module for module in policy.modules() if isinstance(module, policy.float32_units)]
    in_float32 = {id(parameter) for unit in units for parameter in unit.parameters()}  # engines have them so, too

    def make(name: str) -> torch.Tensor:
        whole = _gathered(sent[name].detach())
        if dtype is None or is_adapter_weight(name) or id(sent[name]) in in_float32:
            return whole
        return whole.to(dtype)

    return WeightStream({name: tuple(weight.shape) for name, weight in sent.items()}, make)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A shard's whole tensor, by a collective of all ranks."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else cast(torch.Tensor, full())


def check_shapes(
    sent: Mapping[str, tuple[int, ...]], known: Mapping[str, tuple[int, ...]], required: Collection[str] = ()
) -> None:
    """Refuse tensors that the engine doesn't have, whose shape differs, or that come without the rest of their group,
    and a sync without the `required` ones."""
    groups: dict[str, list[str]] = {}
    for name in known:
        groups.setdefault(group_of(name), []).append(name)
    touched = dict.fromkeys(group_of(name) for name in sent)
    problems = [
        *(f"{name} is not a weight of the engine's model" for name in sent if name not in known),
        *(
            f"{name} has shape {sent[name]}, the engine's {known[name]}"
            for name in sent
            if name in known and tuple(sent[name]) != tuple(known[name])
        ),
        *(
            f"{name} is missing, and its layer can only be loaded as a whole"
            for group in touched
            for name in groups.get(group, ())
            if name not in sent
        ),
        *(f"{name} is missing, and the engine can't act without it" for name in required if name not in sent),
    ]
    if problems:
        raise UsageError(
            f"the weight sync is refused and nothing was changed: {_first(problems)}. Engine and learner must be of "
            "the same checkpoint."
        )


def _first(problems: Sequence[str], count: int = 5) -> str:
    more = f", and {len(problems) - count} more" if len(problems) > count else ""
    return "; ".join(problems[:count]) + more
