"""Writes safetensors files with the permissions that all files of a run have."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write contiguous tensors of the host as one safetensors file, readable by whom the umask lets read."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode & 0o777  # the library would leave 0600
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
