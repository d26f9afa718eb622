"""Models with fresh weights, such as `init:tiny-oft`: for imitation, or to try out a configuration.

They are written to the cache once and read like any checkpoint, so that adapters trained on them find their base later.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlarl.errors import UsageError
from vlarl.policies.openvla.config import DecoderName
from vlarl.policies.supervised import SupervisedPolicy


@dataclass(frozen=True)
class FreshSizes:
    """Sizes of a fresh model; None is the model's own."""

    chunk_length: int | None = None
    num_images: int = 1
    use_proprio: bool = True
    image_size: int | None = None
    action_dim: int | None = None
    proprio_dim: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not the model's own, besides the robot's state."""
        return {name: value for name, value in vars(self).items() if name != "use_proprio" and value is not None}


def _openvla(decoder: DecoderName, small: bool = False) -> Callable[[int, FreshSizes, bool], SupervisedPolicy]:
    def build(seed: int, sizes: FreshSizes, has_statistics: bool) -> SupervisedPolicy:
        from vlarl.policies.tiny import SMALL, TINY, init_tiny  # imported here: it loads the model

        statistics: Mapping[str, Any] | None = None if has_statistics else {}
        return init_tiny(
            decoder,
            seed,
            use_proprio=sizes.use_proprio,
            norm_stats=statistics,
            widths=SMALL if small else TINY,
            **sizes.given,
        )

    return build


def _smolvla(seed: int, sizes: FreshSizes, has_statistics: bool) -> SupervisedPolicy:
    from vlarl.policies.smolvla.tiny import init_tiny_smolvla, unit_scalings

    if not sizes.use_proprio:
        raise ValueError("SmolVLA always reads the robot's state: leave policy.use_proprio out")
    policy = init_tiny_smolvla(seed, **sizes.given)
    if has_statistics:
        policy.use_scalings(unit_scalings(policy.config))
    return policy


FRESH: dict[str, Callable[[int, FreshSizes, bool], SupervisedPolicy]] = {
    "init:tiny-oft": _openvla("parallel"),
    "init:tiny-openvla": _openvla("autoregressive"),
    "init:small-oft": _openvla("parallel", small=True),
    "init:tiny-smolvla": _smolvla,
}
"""By name: makes the model from a seed and sizes, with statistics that leave values as they are, or with none."""


def fresh_checkpoint(path: str, chunk_length: int | None, num_images: int | None, use_proprio: bool | None) -> Path:
    """The folder of a fresh model with these sizes; the same sizes always give the same model."""
    sizes = FreshSizes(chunk_length, num_images or 1, use_proprio is not False)
    try:
        policy = FRESH[path](0, sizes, True)
    except ValueError as error:
        raise UsageError(f"the policy {path} can't be made: {error}") from error
    first = next(policy.parameters()).detach().flatten()[:64]
    mark = hashlib.sha256(repr((path, sizes, first.tolist())).encode()).hexdigest()[:12]
    folder = cache() / f"{path.removeprefix('init:')}-{mark}"
    if not folder.is_dir():
        unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
        policy.save(unfinished)
        unfinished.rename(folder)
    return folder


def cache() -> Path:
    """Where vlarl keeps files that it can create again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlarl" / "fresh"
