"""LoRA layers by peft: fresh ones, those of an adapter folder, and writing such a folder.

Imported only for a model with adapters, since peft takes seconds to load. Code that needs no peft is in adapters.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import Linear as PeftLinear
from torch import nn

from vlarl.config.schema import LoraConfig
from vlarl.policies.adapters import BASE_NAME, CONFIG_NAME, WEIGHTS_NAME, WIDTH_STEP, seeded
from vlarl.policies.checkpoint_json import read_json, whole, write_json
from vlarl.policies.tensor_file import write_tensors
from vlarl.policies.weight_files import not_floats, read_tensors

PREFIX = "base_model.model."  # peft's own files prefix the names of the model with it
ALL_LINEAR = "all-linear"
LARGEST_ALPHA = 16
TAKEN = (  # fields read from an adapter_config.json
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "fan_in_fan_out", "layers_to_transform", "layers_pattern"),
)


class Operands(NamedTuple):
    """The matrices of a layer in the computation's type; the rank is padded to a width that suits the kernels."""

    weight: torch.Tensor  # [out, in] frozen
    bias: torch.Tensor | None
    into: torch.Tensor  # [width, in] A
    out: torch.Tensor  # [out, width] B
    wide: torch.Tensor | None  # [out, in + width] weight and out, where they are in the same memory


class _SaveFirst(torch.autograd.Function):
    """x, saved before the product that reads it: a layer that is recomputed stops there, without its last product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _AddLora(torch.autograd.Function):
    """x W' + b + dropped A' B' scale with W frozen; `dropped` is x after dropout, if any.

    In bfloat16 an early adapter's output is far smaller than the spacing of values of the size of x W': added to an
    x W' that is already rounded, it is lost. (A product that accumulates into its output does not help: cuBLAS rounds
    before it adds.) So one product of [x, low] with [W, B] adds it before anything is rounded. In float32 nothing is
    lost, and with two products a fresh adapter leaves every bit unchanged.

    The gradients of A and B go to the float32 originals. With `saver`, the node of `_SaveFirst` that has x, nothing is
    saved where a recomputation would look for it: what is kept besides is as wide as the rank, or a weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,  # [N, in]
        dropped: torch.Tensor,  # [N, in]
        into: torch.Tensor,  # [rank, in] float32, for its gradient only
        out: torch.Tensor,  # [out, rank] float32, likewise
        scale: float,
        operands: Operands,
        saver: Any,
    ) -> torch.Tensor:
        weight, bias, into_copy, out_copy, wide = operands
        low = (dropped @ into_copy.t()).mul_(scale)
        ctx.saver = saver
        if saver is None:
            ctx.save_for_backward(dropped, low, weight, into_copy, out_copy)  # not `wide`: FSDP drops what it gathered
        else:
            ctx.kept = low, weight, into_copy, out_copy
        ctx.scale, ctx.rank, ctx.separate = scale, into.shape[0], dropped is not x
        if x.dtype == torch.float32:
            return F.linear(x, weight, bias).addmm_(low, out_copy.t())
        return F.linear(torch.cat([x, low], 1), torch.cat([weight, out_copy], 1) if wide is None else wide, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.saver is None:
            dropped, low, weight, into, out = ctx.saved_tensors
        else:
            dropped, (low, weight, into, out) = ctx.saver.saved_tensors[0], ctx.kept
        grad = grads[0]
        grad_low = (grad @ out).mul_(ctx.scale)
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_dropped = None
        if ctx.separate:
            grad_dropped = grad_low @ into if ctx.needs_input_grad[1] else None
        elif grad_x is not None:
            grad_x.addmm_(grad_low, into)
        grad_into = (grad_low.t() @ dropped)[: ctx.rank].float()
        grad_out = (grad.t() @ low)[:, : ctx.rank].float()
        return grad_x, grad_dropped, grad_into, grad_out, None, None, None


class _CachedOperands:
    """Operands in a lower precision than the adapter's, cached between passes. A copy of the layer starts without."""

    def __init__(self) -> None:
        self.versions: object = None  # of what the copies were made from
        self.into = torch.empty(0)
        self.out = torch.empty(0)
        self.wide: torch.Tensor | None = None

    def fits(self, weight: torch.Tensor, into: torch.Tensor) -> bool:
        """Whether new values of the adapter can be written to the copies."""
        here = self.into.device == into.device and self.into.shape[0] - into.shape[0] == -into.shape[0] % WIDTH_STEP
        return here and (self.wide is None or _same_memory(self.wide, weight, self.into.dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> _CachedOperands:
        return _CachedOperands()


class LoraLinear(PeftLinear):
    """peft's layer, computed in fewer steps and rounded once: adapters stay float32, products are in the type of the
    computation."""

    ends_recomputed = False  # the last product of a layer that is recomputed in the backward pass, which needs only x

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The frozen layer's output plus the adapter's."""
        if self.disable_adapters or self.merged or args or kwargs:
            theirs: torch.Tensor = super().forward(x, *args, **kwargs)
            return theirs
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            with torch.autocast(x.device.type, enabled=False):
                return self._adapted(x, dtype)
        return self._adapted(x, self._frozen().weight.dtype)

    def _adapted(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The output of layer and adapter, computed in this type."""
        name = self.active_adapters[0]
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        operands, saver = self.operands(dtype), None
        if self.ends_recomputed and operands.wide is not None and torch.is_grad_enabled():
            flat = _SaveFirst.apply(flat)  # type: ignore[no-untyped-call]
            saver = flat.grad_fn
        dropped = self.lora_dropout[name](flat)
        given = (*self._adapter(), self.scaling[name], operands, saver if dropped is flat else None)
        result: torch.Tensor = _AddLora.apply(flat, dropped, *given)  # type: ignore[no-untyped-call]
        return result.view(*x.shape[:-1], -1)

    def _frozen(self) -> nn.Linear:
        return cast(nn.Linear, self.base_layer)

    def _adapter(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, in] and B [out, rank]."""
        name = self.active_adapters[0]
        into, out = (cast(nn.Linear, part[name]).weight for part in (self.lora_A, self.lora_B))
        return into, out

    @torch.no_grad()
    def operands(self, dtype: torch.dtype) -> Operands:
        """The layer's matrices in this type.

        Copies in a lower precision are cached, and updated in place when the adapter's version counters have changed; a
        change through `.data`, which the counters miss, requires a call of `refresh_operands`.
        """
        into, out = (part.detach() for part in self._adapter())
        frozen = self._frozen()
        weight, bias = frozen.weight.detach(), None if frozen.bias is None else frozen.bias.detach().to(dtype)
        if into.dtype == dtype:  # float32; or gathered by FSDP for this pass, and not to be kept
            return Operands(weight, bias, into, out, None)
        known = self.__dict__.get("_cached_operands")  # bypasses nn.Module: neither a parameter nor a buffer
        if known is None or (known.wide is not None and not _same_memory(known.wide, weight, dtype)):
            known = self.__dict__["_cached_operands"] = _CachedOperands()
        padding = -into.shape[0] % WIDTH_STEP
        if known.wide is None and weight.dtype == dtype and weight.is_contiguous():
            self._widen(known, into.shape[0] + padding)
            weight = frozen.weight.detach()
            if weight.is_cuda:
                torch.cuda.empty_cache()  # or the narrow weights' memory stays reserved: nothing else is of their size
        versions = _versions(into, out, dtype)
        if known.versions != versions:
            known.into = _updated(known.into, F.pad(into, (0, 0, 0, padding)).to(dtype))
            known.out = _updated(known.out, F.pad(out, (0, padding)).to(dtype))
            known.versions = versions
        return Operands(weight.to(dtype), bias, known.into, known.out, known.wide)

    def _widen(self, known: _CachedOperands, width: int) -> None:
        """Extend the frozen weight by a few columns for B in the same memory: concatenating them in each pass would
        take as long as many products. Only one adapter can use them; another one on the same weight, a critic's,
        concatenates."""
        weight = self._frozen().weight
        wide = weight.new_zeros(weight.shape[0], weight.shape[1] + width)
        wide[:, : weight.shape[1]] = weight
        weight.data = wide[:, : weight.shape[1]]
        known.wide, known.out, known.versions = wide, wide[:, weight.shape[1] :], None


def _same_memory(wide: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the weight is still stored in `wide` and computed in its type."""
    return wide.data_ptr() == weight.data_ptr() and wide.dtype == dtype


def _updated(kept: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """The fresh values, in the memory of the cached ones if they fit: a captured graph reads from there."""
    if (kept.shape, kept.dtype, kept.device) != (fresh.shape, fresh.dtype, fresh.device):
        return fresh
    return kept.copy_(fresh)


def _versions(into: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> object:
    """What changes with an adapter's values or their place."""
    return into._version, out._version, into.data_ptr(), out.data_ptr(), dtype


@torch.no_grad()
def refresh_operands(model: nn.Module) -> None:
    """Update the adapters' cached operands, however the adapters were changed: all in a few kernels, in place."""
    pairs: tuple[list[tuple[torch.Tensor, torch.Tensor]], ...] = [], []  # copies of A, and of B, columns of the weight
    for module in model.modules():
        if not isinstance(module, LoraLinear) or (known := module.__dict__.get("_cached_operands")) is None:
            continue
        known.versions, dtype = None, known.into.dtype
        into, out = (part.detach() for part in module._adapter())
        if known.fits(module._frozen().weight, into):
            pairs[0].append((known.into[: into.shape[0]], into))
            pairs[1].append((known.out[:, : into.shape[0]], out))
            known.versions = _versions(into, out, dtype)
        else:
            module.operands(dtype)
    for part in pairs:
        if part:
            torch._foreach_copy_([copy for copy, _ in part], [value for _, value in part])


def add_fresh(model: nn.Module, lora: LoraConfig, linears: Sequence[str], base: str, seed: int) -> None:
    """Freeze the model and add new adapters, which change nothing yet, to the chosen layers."""
    targets: list[str] = []
    for pattern in lora.target_modules:
        found = [n for n in linears if pattern == ALL_LINEAR or n == pattern or n.endswith(f".{pattern}")]
        if not found:
            ends = sorted({name.rpartition(".")[2] for name in linears})
            raise ValueError(
                f"target_modules: no linear layer's name ends in {pattern!r}; use {ALL_LINEAR} or {', '.join(ends)}"
            )
        targets += found
    config = PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or min(lora.rank, LARGEST_ALPHA),
        lora_dropout=lora.dropout,
        target_modules=sorted(set(targets)),
        init_lora_weights=True,
        base_model_name_or_path=base,
    )
    with seeded(model, seed):
        _inject(model, config)


def add_from(model: nn.Module, folder: Path, base: str) -> None:
    """Freeze the model and add a folder's adapters to its layers; one error lists everything that doesn't fit."""
    config = _read_config(folder)
    config.base_model_name_or_path = base
    state = {}
    for name, tensor in read_tensors(folder / WEIGHTS_NAME):
        if not tensor.is_floating_point():
            raise not_floats(folder / WEIGHTS_NAME, name, tensor.dtype)
        state[name.removeprefix(PREFIX)] = tensor.float()
    _refuse_other_ranks(config, state, folder)
    trained_on = read_json(folder / CONFIG_NAME).get("base_model_name_or_path")
    remedy = f"the adapter {folder} was trained on {trained_on}, and does not fit {base}"
    try:
        _inject(model, config)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, re.error) as error:
        raise ValueError(f"{remedy}: {error}") from error  # what peft raises for values of the wrong type
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    wrong = [
        *(f"{name} is missing" for name in own if name not in state),
        *(f"{name} has no layer" for name in state if name not in own),
        *(
            f"{name} is {tuple(state[name].shape)} for {tuple(own[name].shape)}"
            for name in own
            if name in state and state[name].shape != own[name].shape
        ),
    ]
    if wrong:
        raise ValueError(f"{remedy}: {'; '.join(wrong)}")
    if not next(model.parameters()).is_meta:
        set_peft_model_state_dict(model, state)


def _refuse_other_ranks(config: PeftLoraConfig, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Check, before layers of the declared rank are created, that the weights have that rank."""
    odd = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if odd:
        raise ValueError(f"{folder / WEIGHTS_NAME} holds NaN or infinity, first in {odd[0]}: use an earlier adapter")
    stored = {tensor.shape[0] for name, tensor in state.items() if ".lora_A." in name and tensor.ndim == 2}
    declared = [config.r, *(config.rank_pattern or {}).values()]
    if not stored or not all(isinstance(rank, int) and 1 <= rank <= max(stored) for rank in declared):
        held = ", ".join(map(str, sorted(stored))) or "none"
        raise ValueError(
            f"{folder / CONFIG_NAME} declares rank {', '.join(str(rank)[:40] for rank in declared)}, but the ranks in "
            f"{WEIGHTS_NAME} are {held}: copy or download the adapter again"
        )


def save(model: nn.Module, folder: Path, base: str, base_fingerprint: str) -> None:
    """Write the adapters as peft does, and the identity of their base weights."""
    config = _config(model)
    config.base_model_name_or_path = base
    config.target_modules = sorted(config.target_modules or ())  # a set: its order would change from file to file
    config.inference_mode = True  # as in peft's files; ours are trained further whatever it says
    config.save_pretrained(str(folder))
    config.inference_mode = False
    state = {
        f"{PREFIX}{name}": tensor.detach().cpu().contiguous()
        for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    write_tensors(state, folder / WEIGHTS_NAME)
    write_json(folder / BASE_NAME, {"base": base, "fingerprint": base_fingerprint})


def _config(model: nn.Module) -> PeftLoraConfig:
    return cast(PeftLoraConfig, cast(Any, model).peft_config["default"])  # where peft keeps it


def _read_config(folder: Path) -> PeftLoraConfig:
    kind = read_json(folder / CONFIG_NAME).get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{folder} holds an adapter of type {kind}: only LORA is supported")
    try:
        given = PeftLoraConfig.from_pretrained(str(folder))
        # Only these: others make peft import a module that the file names, or compute weights of its own.
        config = PeftLoraConfig(**{name: getattr(given, name) for name in TAKEN}, init_lora_weights=True)
        whole(config.r, "r", 1)
        if not math.isfinite(config.lora_alpha) or not 0 <= config.lora_dropout < 1:
            raise ValueError(f"lora_alpha is {config.lora_alpha} and lora_dropout is {config.lora_dropout}")
    except Exception as error:  # what peft raises for values of the wrong type is not documented
        raise ValueError(f"{folder / CONFIG_NAME} is malformed ({error}): copy or download it again") from error
    extras = {name: getattr(given, name, None) for name in ("use_dora", "lora_bias", "modules_to_save")}
    extras["bias"] = None if given.bias == "none" else given.bias
    used = [f"{name} = {value!r}" for name, value in extras.items() if value]
    if used:
        raise ValueError(
            f"the adapter {folder} is more than LoRA ({', '.join(used)}), which is not supported: train it with plain "
            "LoRA, or merge it with the code that made it"
        )
    config.inference_mode = False
    return config


def _inject(model: nn.Module, config: PeftLoraConfig) -> None:
    """Add peft's layers to the model in place; everything else is frozen, the adapters are float32."""
    if not (getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)):
        config._register_custom_module({nn.Linear: LoraLinear})
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        trained = ".lora_" in name
        parameter.requires_grad_(trained)
        if trained:
            parameter.data = parameter.data.float()
