"""The device that a user chose, or why torch can't use it."""

from __future__ import annotations

import gc
import os

import torch

from vlarl.config.words import counted
from vlarl.errors import UsageError, VlarlError


def usable_device(option: str, wanted: str) -> torch.device:
    """The device of this name; UsageError with a remedy if torch can't use it."""
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = _why_no_cuda(wanted) if wanted.startswith("cuda") else None
        reason = reason or f"{str(error).splitlines()[0]}; try `cpu`."
        raise UsageError(f"{option}: {wanted!r} can't be used here: {reason}") from error
    return device


def _why_no_cuda(wanted: str) -> str | None:
    """What is missing, as the end of a sentence; None if torch's own message is the best explanation."""
    version, built_for = torch.__version__, torch.version.cuda or torch.version.hip
    if built_for is None:
        install = f"pip uninstall -y torch && pip install torch=={version.partition('+')[0]}"
        return (
            f"this torch ({version}) is built for the CPU only. Install its CUDA build: `{install}` "
            "(https://pytorch.org/get-started has the command for your system and driver), or use `cpu`."
        )
    found = torch.cuda.device_count()
    if found == 0:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        limits = f" CUDA_VISIBLE_DEVICES is {hidden!r}: unset it if it hides them." if hidden is not None else ""
        return (
            f"torch ({version}, built for CUDA {built_for}) sees no GPU.{limits} Check the driver with `nvidia-smi`, "
            "or use `cpu`."
        )
    index = wanted.partition(":")[2]
    if index.isdigit() and int(index) >= found:
        return f"torch sees {counted(found, 'GPU')}: use {' or '.join(f'cuda:{n}' for n in range(min(found, 8)))}."
    return None


def choose_device(wanted: str) -> torch.device:
    """The chosen device; `auto` is a GPU if there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return usable_device("run.device", wanted)


REMEDIES = (
    "Make the model smaller: policy.quantize 4 for a base in 4 bits (with lora.enabled; presets *_16gb), "
    "policy.gradient_checkpointing true, a lower lora.rank, policy.freeze vision, fewer or smaller images "
    "(policy.num_images, another checkpoint); or stop other programs on the GPU, or use a larger one. "
    "`vlarl doctor --model M --memory 24` estimates what fits."
)


def out_of_memory(doing: str, reason: object) -> VlarlError:
    """The error that ends a run for which the GPU's memory is too small; `reason` is torch's own error or its text."""
    first = str(reason).split("\n", 1)[0].split(". If reserved", 1)[0].rstrip(".")
    return VlarlError(f"{doing} ran out of memory: {first}. {REMEDIES}")


def free_cached_memory(device: torch.device) -> None:
    """Give memory that torch keeps for later back to the GPU, as after a pass that did not fit."""
    gc.collect()  # errors and their frames may refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it followed, says that the device's memory is too small."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error is not None
