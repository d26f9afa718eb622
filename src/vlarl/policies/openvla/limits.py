"""Limits on the size of a model that an untrusted config.json describes, checked before any of it is built.

The weight files bound the model: a config.json that describes a much larger one does not belong to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlarl.policies.openvla.config import OpenVLAConfig

LARGEST_IMAGE = 8192  # pixels of a side
LARGEST_CHUNK = 4096  # actions of a decision, dimensions of an action or of a robot's state
LARGEST_NUM_IMAGES = 64
LARGEST_NUM_BINS = 1 << 16
# Within this slack a model is still built on the meta device, so that the error can name the missing weights.
SLACK, SMALL_MODEL, FEW_BLOCKS = 16, 100_000_000, 1000


def check_size(config: OpenVLAConfig, folder: Path, shapes: Mapping[str, tuple[int, ...]], towers: bool) -> None:
    """Refuse a model that has far more layers or parameters than the folder's files hold; `towers` too, unless they
    come from another file."""
    from vlarl.policies.openvla.config import language_config

    text = language_config(config.text)
    layers, width = int(text.num_hidden_layers), int(text.hidden_size)
    # A lower bound: what every layer has, whatever its kind of attention.
    least = config.padded_vocab_size * width + layers * width * (3 * int(text.intermediate_size) + width)
    num_blocks = layers
    if towers:
        num_blocks += sum(tower.depth for tower in config.towers)
        least += sum(
            tower.depth * tower.embed_dim * (4 * tower.embed_dim + 2 * tower.mlp_dim)
            + tower.num_positions * tower.embed_dim
            for tower in config.towers
        )
    stored = sum(math.prod(shape) for shape in shapes.values())
    if least > SLACK * stored + SMALL_MODEL or num_blocks > len(shapes) + FEW_BLOCKS:
        raise ValueError(
            f"config.json describes {num_blocks:,} layers with {least:,} parameters or more, but the weight files of "
            f"{folder} hold {stored:,} in {len(shapes):,} tensors: config.json and weights are of different "
            "checkpoints. Copy or download the folder again"
        )


@contextmanager
def building(source: Path | str) -> Iterator[None]:
    """Turn the errors of PyTorch and transformers about inconsistent sizes into a message."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, AssertionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"the config.json of {source} describes a model that can't be built ({reason}): copy or download it again"
        ) from error
