"""Models with fresh weights, `init:tiny-oft` and `init:tiny-openvla`: for imitation, or to try out a configuration.

They are written to the cache once and read like any checkpoint, so that adapters trained on them find their base later.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from vlarl.policies.openvla.config import DecoderName

FRESH: dict[str, DecoderName] = {"init:tiny-oft": "parallel", "init:tiny-openvla": "autoregressive"}


def fresh_checkpoint(path: str, chunk_length: int | None, num_images: int | None, use_proprio: bool | None) -> Path:
    """The folder of a fresh model with these sizes; the same sizes always give the same model."""
    from vlarl.policies.tiny import init_tiny  # imported here: it loads the model

    sizes = (chunk_length, num_images or 1, use_proprio is not False)
    policy = init_tiny(FRESH[path], 0, chunk_length=sizes[0], num_images=sizes[1], use_proprio=sizes[2])
    first = next(policy.parameters()).detach().flatten()[:64]
    mark = hashlib.sha256(repr((path, *sizes, first.tolist())).encode()).hexdigest()[:12]
    folder = cache() / f"{path.removeprefix('init:')}-{mark}"
    if not folder.is_dir():
        unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
        policy.save(unfinished)
        unfinished.rename(folder)
    return folder


def cache() -> Path:
    """Where vlarl keeps files that it can create again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlarl" / "fresh"
