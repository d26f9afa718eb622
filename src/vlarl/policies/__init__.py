"""Policies: vision-language-action models behind one contract."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub.errors import StrictDataclassError

from vlarl.errors import UsageError
from vlarl.policies.openvla.policy import OpenVLAPolicy

BUILTIN = {"builtin:tiny-oft": "tiny-oft", "builtin:tiny-openvla": "tiny-openvla"}
"""Checkpoints that ship with vlarl, and their folders in the package."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(
    path: str | Path,
    *,
    decoder: Literal["autoregressive", "parallel"] | None = None,
    chunk_length: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: torch.device | str = "cpu",
) -> OpenVLAPolicy:
    """Load a checkpoint folder or a built-in model; what is None is taken from the checkpoint."""
    folder = checkpoint_folder(path)
    try:
        policy = OpenVLAPolicy.load(
            folder, decoder=decoder, chunk_length=chunk_length, dtype=DTYPES[dtype], device=device
        )
    except (OSError, ValueError, StrictDataclassError) as error:  # the last one: sizes that transformers refuses
        reason = " ".join(str(error).split())
        raise UsageError(f"the policy {path} can't be loaded: {reason}") from error
    broken = [name for name, weight in policy.named_parameters() if not weight.isfinite().all()]
    if broken:
        raise UsageError(
            f"the policy {path} can't be used: {len(broken)} of its weights hold NaN or infinity, the first is "
            f"{broken[0]}. Take an earlier checkpoint."
        )
    return policy


def checkpoint_folder(path: str | Path) -> Path:
    """The folder behind a built-in name or a path, or a message that says what is missing there."""
    if str(path) in BUILTIN:
        return Path(str(files("vlarl.policies") / "builtin" / BUILTIN[str(path)]))
    folder = Path(path)
    if not (folder / "config.json").is_file():
        what = "it holds no config.json" if folder.is_dir() else "there is no such folder"
        raise UsageError(
            f"{path} is not a checkpoint: {what}. Give a checkpoint folder, such as runs/<name>/checkpoints/final, "
            f"or one of {', '.join(BUILTIN)}."
        )
    return folder
