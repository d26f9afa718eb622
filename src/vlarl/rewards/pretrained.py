"""Parts of Hugging Face checkpoints for reward models: none runs code of its folder, and no pickle is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from vlarl.errors import UsageError


def load_part(kind: Any, path: str, **options: Any) -> Any:
    """Load a folder or hub id with a transformers class, without running its code; UsageError where that fails."""
    try:
        # By default the library asks on the terminal whether to run code from the folder.
        return kind.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"reward.model: {path} can't be loaded: {reason}") from error


def load_whole(kind: Any, path: str) -> Any:
    """A model with all its weights, in the precision they are stored in; pickled files are not read."""
    model, report = load_part(kind, path, dtype="auto", use_safetensors=True, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise UsageError(
            f"reward.model: {path} lacks {len(missing)} weights, the first is {missing[0]}: its scores would be "
            "random. Take a checkpoint that was trained to score."
        )
    return model


def save_part(part: Any, folder: Path) -> None:
    """Write a model or a tokenizer as the library does, without its progress bar."""
    logs: Any = transformers.logging
    shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        part.save_pretrained(folder)
    finally:
        if shown:
            logs.enable_progress_bar()
