"""Writes safetensors files with the permissions that all files of a run have."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write contiguous CPU tensors as one safetensors file, with the permissions that the umask gives."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode & 0o777  # the library would set 0600
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
