"""LoRA layers by peft: fresh ones, those of an adapter folder, and writing such a folder.

Loaded only where a model has adapters: peft takes seconds to load. What needs no peft is in adapters.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import Linear as PeftLinear
from torch import nn

from vlarl.config.schema import LoraConfig
from vlarl.policies.openvla.adapters import BASE_NAME, CONFIG_NAME, WEIGHTS_NAME, seeded
from vlarl.policies.openvla.config import read_json
from vlarl.policies.openvla.weights import read_tensors, write_json, write_tensors

PREFIX = "base_model.model."  # what peft's own files put before the names of the model
ALL_LINEAR = "all-linear"
LARGEST_ALPHA = 16


class _AddLora(torch.autograd.Function):
    """x W' + b + x A' B' with W frozen, as one node: three products forward, five backward, and nothing else of the
    output's size. A and B take part as copies in the type of x; their gradients go to the float32 originals."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,  # [N, in]
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None,
        into: torch.Tensor,  # [rank, in] float32, for its gradient alone
        out: torch.Tensor,  # [out, rank] float32, likewise
        into_copy: torch.Tensor,
        out_copy: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        low = x @ into_copy.t()
        result = F.linear(x, weight, bias)
        result.addmm_(low, out_copy.t(), alpha=scale)
        ctx.save_for_backward(x, low, weight, into_copy, out_copy)
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, low, weight, into_copy, out_copy = ctx.saved_tensors
        grad = grads[0]
        grad_low = (grad @ out_copy).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_low, into_copy)
        grad_into = (grad_low.t() @ x).float()
        grad_out = (grad.t() @ low).float() * ctx.scale
        return grad_x, None, None, grad_into, grad_out, None, None, None


class LoraLinear(PeftLinear):
    """peft's layer, computed with fewer and smaller steps: adapters stay float32, products are in the type of x."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The frozen layer's answer plus the adapter's."""
        base, name = self.base_layer, self.active_adapters[0]
        dropout = self.lora_dropout[name]
        plain = not (self.disable_adapters or self.merged or args or kwargs) and isinstance(dropout, nn.Identity)
        if not plain or base.weight.dtype != x.dtype or torch.is_autocast_enabled(x.device.type):
            theirs: torch.Tensor = super().forward(x, *args, **kwargs)
            return theirs
        into, out = (cast(nn.Linear, part[name]).weight for part in (self.lora_A, self.lora_B))
        copies = self.copies(x.dtype)
        flat = _AddLora.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), base.weight, base.bias, into, out, *copies, self.scaling[name]
        )
        result: torch.Tensor = flat.view(*x.shape[:-1], -1)
        return result

    def copies(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The adapter in the type of the computation.

        Copies in a smaller type are kept, and brought up to date in place when the weights' counters of changes have
        moved; a change through `.data`, which they don't see, needs a call of `refresh_copies`.
        """
        name = self.active_adapters[0]
        into, out = (cast(nn.Linear, part[name]).weight for part in (self.lora_A, self.lora_B))
        if into.dtype == dtype:
            return into.detach(), out.detach()
        known = self.__dict__.get("_copies")
        versions = (into._version, out._version, into.data_ptr(), out.data_ptr(), dtype)
        if known is None or known[0] != versions:
            with torch.no_grad():
                fresh = (into.detach().to(dtype), out.detach().to(dtype))
                if known is not None and known[1].dtype == dtype and known[1].device == into.device:
                    known[1].copy_(fresh[0])  # in place: a captured graph reads from here
                    known[2].copy_(fresh[1])
                    fresh = (known[1], known[2])
            known = (versions, *fresh)
            self.__dict__["_copies"] = known  # past nn.Module: no parameter, no buffer
        return known[1], known[2]


def refresh_copies(model: nn.Module) -> None:
    """Bring the copies that adapters compute with up to date, whoever changed the adapters and however."""
    for module in model.modules():
        if isinstance(module, LoraLinear) and (known := module.__dict__.get("_copies")) is not None:
            module.__dict__["_copies"] = (None, *known[1:])
            module.copies(known[1].dtype)


def add_fresh(model: nn.Module, lora: LoraConfig, linears: Sequence[str], base: str, seed: int) -> None:
    """Freeze the model and put new adapters, which change nothing yet, beside the chosen layers."""
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
    """Freeze the model and put a folder's adapters beside its layers; what doesn't fit is told at once."""
    config = _read_config(folder)
    config.base_model_name_or_path = base
    state = {name.removeprefix(PREFIX): tensor.float() for name, tensor in read_tensors(folder / WEIGHTS_NAME)}
    trained_on = read_json(folder / CONFIG_NAME).get("base_model_name_or_path")
    remedy = f"the adapter {folder} was trained on {trained_on}, and does not fit {base}"
    try:
        _inject(model, config)
    except ValueError as error:
        raise ValueError(f"{remedy}: {error}") from error
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
    set_peft_model_state_dict(model, state)


def save(model: nn.Module, folder: Path, base: str, base_fingerprint: str) -> None:
    """Write the adapters as peft does, and what weights they belong to."""
    config = _config(model)
    config.base_model_name_or_path = base
    config.target_modules = sorted(config.target_modules or ())  # a set: its order would change from file to file
    config.inference_mode = True  # the habit of peft's files; ours are trained on whatever it says
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
        config: PeftLoraConfig = PeftLoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG_NAME} is malformed ({error}): copy or download it again") from error
    extras = {name: getattr(config, name, None) for name in ("use_dora", "lora_bias", "modules_to_save")}
    extras["bias"] = None if config.bias == "none" else config.bias
    used = [f"{name} = {value!r}" for name, value in extras.items() if value]
    if used:
        raise ValueError(
            f"the adapter {folder} is more than LoRA ({', '.join(used)}), which is not supported: train it with plain "
            "LoRA, or merge it with the code that made it"
        )
    config.inference_mode = False
    return config


def _inject(model: nn.Module, config: PeftLoraConfig) -> None:
    """Put peft's layers into the model, in place; everything else is frozen, the adapters are float32."""
    if not (getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)):
        config._register_custom_module({nn.Linear: LoraLinear})
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        trained = ".lora_" in name
        parameter.requires_grad_(trained)
        if trained:
            parameter.data = parameter.data.float()
