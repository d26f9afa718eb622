"""LoRA adapters inside a vLLM engine, which keeps them as adapters.

    AdapterLoader   adds empty adapters to the model's layers before its weights are loaded and its graphs are recorded
    AdapterWorker   mixed into vLLM's workers: `load_adapters` copies what a sync brings into them

vLLM's own LoRA adds an adapter's output to an output that is rounded already, which loses most of an early update in
bfloat16. Here a layer and its adapters are one product of [x, low] with [W, B], as in the learner (policies/lora.py).
The layers that vLLM packs (q, k and v; gate and up) keep their adapters side by side: A one above the other, B block by
block. With tensor parallelism each worker has the rows of B, or the columns of A, that belong to its part of W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vlarl.errors import UsageError
from vlarl.policies.adapters import WIDTH_STEP
from vlarl.weights.buckets import unpacked
from vlarl.weights.stream import PACKED
from vlarl.weights.vllm_plugin import ADAPTER_FORMAT


@dataclass(frozen=True)
class Slot:
    """Where one adapter is kept: in a layer of its own, or beside others in a packed one."""

    layer: nn.Module
    columns: slice  # of `adapter_out`, and rows of `adapter_into`
    rows: slice  # of `adapter_out`
    rows_of_b: slice  # that this worker has
    columns_of_a: slice  # that this worker has


class AdapterLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's loader of safetensors, for models with adapters."""

    def __init__(self, load_config: LoadConfig) -> None:
        # layer -> (rank, scale)
        self.adapters: dict[str, tuple[int, float]] = load_config.model_loader_extra_config[ADAPTER_FORMAT]
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Add the adapters, which change nothing yet, and load the weights."""
        attach(model, self.adapters)
        super().load_weights(model, model_config)
        for layer in {id(slot.layer): slot.layer for slot in model.__dict__["adapter_slots"].values()}.values():
            widen(layer)


class AdapterWorker:
    """A method for vLLM's workers, called by `collective_rpc`."""

    def load_adapters(self, payload: bytes) -> None:
        """Copy the adapters of a bucket into the model."""
        model: nn.Module = cast(Any, self).get_model()
        slots: dict[str, Slot] = model.__dict__["adapter_slots"]
        for name, tensor in unpacked(payload).items():
            layer, _, part = name.removesuffix(".weight").rpartition(".")
            slot = slots[layer]
            into, out = cast(Any, slot.layer).adapter_into, cast(Any, slot.layer).adapter_out
            if part == "lora_A":
                into[slot.columns] = tensor[:, slot.columns_of_a].to(into)
            else:
                out[slot.rows, slot.columns] = tensor[slot.rows_of_b].to(out)


def attach(model: nn.Module, adapters: Mapping[str, tuple[int, float]]) -> None:
    """Give layers empty adapters of these ranks and scales, by the names of the checkpoint."""
    modules = dict(model.named_modules())
    mapper = getattr(model, "hf_to_vllm_mapper", None)  # vLLM's classes for vision-language models rename their parts
    parts: dict[str, list[tuple[str, int, float]]] = {}  # layer of the engine -> its adapters, in the order of the rows
    for name, (rank, scale) in adapters.items():
        own = name if mapper is None else mapper.get_rename_mapper().map_name(name) or name
        parent, dot, projection = own.rpartition(".")
        layer = own if own in modules else f"{parent}{dot}{PACKED.get(projection, projection)}"
        if not _can_be_adapted(modules.get(layer)):
            raise UsageError(
                f"an adapter on {name} can't run in vLLM, which has no linear layer for it: leave that layer out of "
                "lora.target_modules, or use the torch engine (vllm.num_engines 0)."
            )
        parts.setdefault(layer, []).append((name, rank, scale))
    slots: dict[str, Slot] = {}
    for path, given in parts.items():
        layer = modules[path]
        first, scales = 0, []
        for name, rank, scale in given:
            projection = name.rpartition(".")[2]
            index = [part for part, packed in PACKED.items() if packed == path.rpartition(".")[2]]
            position = index.index(projection) if projection in index else None
            slots[name] = Slot(layer, slice(first, first + rank), *_own_part(layer, position, name))
            first += rank
            scales += [scale] * rank
        _add_matrices(layer, scales)
    model.__dict__["adapter_slots"] = slots


def _can_be_adapted(layer: nn.Module | None) -> bool:
    """Whether the layer computes by its own forward, unquantised: vLLM's head, for example, does not."""
    return type(layer) is nn.Linear or (
        isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod)
    )


def _own_part(layer: nn.Module, position: int | None, name: str) -> tuple[slice, slice, slice]:
    """(rows of the layer's output, rows of B, columns of A) for the part of a packed layer at this position, on this
    worker; without a position the adapter is the whole layer's."""
    everything = slice(None)
    if not isinstance(layer, LinearBase):
        return everything, everything, everything
    sizes = cast(Any, layer).output_partition_sizes
    if position is None and len(sizes) > 1:  # q, k and v are one layer in the checkpoint, too
        if layer.tp_size > 1:
            raise UsageError(
                f"an adapter on {name} can't be divided over the GPUs of an engine: leave that layer out of "
                "lora.target_modules, or set vllm.tensor_parallel_size to 1."
            )
        return everything, everything, everything
    position = position or 0
    start = sum(sizes[:position])
    rows = slice(start, start + sizes[position])
    whole = layer.output_size if len(sizes) == 1 else None
    if whole == sizes[0]:  # not divided along its output; perhaps along its input
        width = getattr(layer, "input_size_per_partition", layer.input_size)
        first = layer.tp_rank * width if width != layer.input_size else 0
        return rows, everything, slice(first, first + width)
    copies = getattr(layer, "num_kv_head_replicas", 1) if position > 0 else 1  # workers that hold the same keys
    first = (layer.tp_rank // copies) * sizes[position]
    return rows, slice(first, first + sizes[position]), everything


def _add_matrices(layer: nn.Module, scales: list[float]) -> None:
    weight = cast(torch.Tensor, layer.weight)
    width = len(scales) + -len(scales) % WIDTH_STEP
    made: Any = layer
    made.register_buffer("adapter_into", weight.new_zeros(width, weight.shape[1]), persistent=False)
    made.register_buffer("adapter_out", weight.new_zeros(weight.shape[0], width), persistent=False)
    scale = torch.tensor([*scales, *[0.0] * (width - len(scales))], dtype=torch.float32, device=weight.device)
    made.register_buffer("adapter_scale", scale, persistent=False)
    if isinstance(layer, LinearBase):
        layer.quant_method = AdaptedLinearMethod()
    else:
        layer.__class__ = AdaptedLinear


@torch.no_grad()
def widen(layer: nn.Module) -> None:
    """Keep the weight and B in one matrix [W, B], so that they are one operand; in float32 they are two."""
    made: Any = layer
    if made.weight.dtype == torch.float32:
        return
    num_inputs = made.weight.shape[1]
    made.register_buffer("adapter_wide", torch.cat([made.weight, made.adapter_out], 1), persistent=False)
    made.weight.data = made.adapter_wide[:, :num_inputs]
    made.adapter_out = made.adapter_wide[:, num_inputs:]


def adapted(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W' + b + x A' B' scale, rounded once."""
    low = (F.linear(x, layer.adapter_into) * layer.adapter_scale).to(x.dtype)
    if x.dtype == torch.float32:
        return F.linear(x, layer.weight, bias) + F.linear(low, layer.adapter_out)
    return F.linear(torch.cat([x, low], -1), layer.adapter_wide, bias)


class AdaptedLinear(nn.Linear):
    """A linear layer of vlarl's own towers, with an adapter."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """The layer's output plus the adapter's."""
        return adapted(self, input, self.bias)


class AdaptedLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """How a layer of vLLM with adapters computes: unpacked, since W and B are one operand."""

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """The layer has its weights already."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Weights stay as they were loaded."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's output plus the adapters'."""
        return adapted(layer, x, bias)
