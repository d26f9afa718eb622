"""A base in 4 or 8 bits, for LoRA on a small GPU: linear layers of bitsandbytes, quantised as their weights are loaded.

4 bits are QLoRA's (Dettmers et al. 2023, arXiv:2305.14314): nf4, doubly quantised, computed in bfloat16. 8 bits are
LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339) with its threshold for outliers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import Any, Literal, cast

import torch
from torch import nn

from vlarl.errors import MissingExtraError

# On a CPU with bfloat16 instructions, bitsandbytes looks for a kernel to download when it is imported and warns that
# there is none; and peft imports it for every adapter. Nothing here needs that kernel.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# Values that share a scale in 4 bits. Rows that are not a multiple of it stay in full precision (in OpenVLA-7B one
# matrix of each SigLIP block): bitsandbytes 0.50 dequantises them wrongly on a CPU.
BLOCK = 64
# Four bits a weight, a byte for the scale of a block and a float32 for 256 scales; or a byte a weight, the scale of a
# whole row being negligible.
QUANTIZED_BYTES = {4: 0.5 + 1 / BLOCK + 4 / (BLOCK * 256), 8: 1.0}
UNPACKED_BYTES = {4: 2, 8: 4}  # of a weight in the one matrix that is unpacked at a time
OUTLIER_THRESHOLD = 6.0  # of an activation; columns with larger ones are multiplied in 16 bits


def quantize_linears(model: nn.Module, bits: Literal[4, 8], names: re.Pattern[str]) -> None:
    """Replace the linear layers of these names in a model on the meta device; loading then quantises each weight."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and names.fullmatch(name):
            _replace(model, name, module, bits)
    _mark(model, bits)


def quantize_loaded(model: nn.Module, bits: Literal[4, 8], names: Collection[str], device: torch.device | str) -> None:
    """Quantise the linear layers of these names in a model whose weights are on the host; they move to the device."""
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        new = _replace(model, name, module, bits)
        if new is not None:
            new.weight = cast(nn.Parameter, quantized(new.weight, module.weight.detach(), device))
    _mark(model, bits)


def _replace(model: nn.Module, name: str, module: nn.Linear, bits: Literal[4, 8]) -> nn.Linear | None:
    """Put an empty quantised layer in place of another; None where that one stays, as its rows are not whole blocks."""
    if bits not in (4, 8):
        raise ValueError(f"a base in {bits} bits is not possible: use 4 or 8")
    bnb = _bitsandbytes()
    if bits == 4 and module.in_features % BLOCK:
        return None
    sizes = (module.in_features, module.out_features)
    with torch.device("meta"):
        new: nn.Linear = (
            bnb.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
            if bits == 4
            else bnb.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD)
        )
    new.bias = module.bias  # with its requires_grad
    # On a CPU with bfloat16 instructions, a pass in evaluation mode would repack the weights for good, into a layout
    # that has no gradient. The attribute is that of bitsandbytes.
    cast(Any, new).support_avx512bf16_for_cpu = False
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)
    return new


def _mark(model: nn.Module, bits: Literal[4, 8]) -> None:
    cast(Any, model).is_loaded_in_4bit = bits == 4  # peft reads these attributes
    cast(Any, model).is_loaded_in_8bit = bits == 8


def waits_for_quantization(parameter: torch.Tensor) -> bool:
    """Whether this is the empty weight of a layer that `quantize_linears` inserted."""
    return parameter.is_meta and type(parameter).__name__ in ("Params4bit", "Int8Params")


def quantized(empty: torch.Tensor, weight: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A full-precision weight [out, in] on the host -> the quantised parameter on the device, as `empty` requires."""
    kind = cast(Any, type(empty))
    settings = {name: value for name, value in vars(empty).items() if name not in ("quant_state", "bnb_quantized")}
    parameter: torch.Tensor = kind(weight, requires_grad=False, **settings).to(device)
    return parameter


def refuse_quantized(name: str, tensor: torch.Tensor) -> None:
    """Refuse to write a quantised weight: the original layout can't represent it."""
    if tensor.dtype in (torch.int8, torch.uint8):
        raise ValueError(
            f"{name} is quantised to 4 or 8 bits, which the checkpoint's layout can't hold: save the adapter alone and "
            "merge it into the base in full precision (vlarl merge ADAPTER OUT --base BASE)"
        )


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes.nn
    except ImportError as error:
        raise MissingExtraError("bitsandbytes", "quant") from error
    return bitsandbytes.nn
