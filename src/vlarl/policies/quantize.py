"""A base in 4 or 8 bits, for LoRA on a small GPU: linear layers of bitsandbytes, quantised as their weights are loaded.

4 bits are QLoRA's (Dettmers et al. 2023, arXiv:2305.14314): nf4, doubly quantised, computed in bfloat16. 8 bits are
LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339) with its threshold for outliers.
"""

from __future__ import annotations

import logging
import re
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
OUTLIER_THRESHOLD = 6.0  # of an activation; columns with larger ones are multiplied in 16 bits


def quantize_linears(model: nn.Module, bits: Literal[4, 8], names: re.Pattern[str]) -> None:
    """Replace the linear layers of these names in a model on the meta device; loading then quantises each weight."""
    if bits not in (4, 8):
        raise ValueError(f"a base in {bits} bits is not possible: use 4 or 8")
    bnb = _bitsandbytes()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or not names.fullmatch(name):
            continue
        if bits == 4 and module.in_features % BLOCK:
            continue
        sizes = (module.in_features, module.out_features)
        with torch.device("meta"):
            new: nn.Linear = (
                bnb.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
                if bits == 4
                else bnb.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD)
            )
        new.bias = module.bias  # with its requires_grad
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, new)
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
