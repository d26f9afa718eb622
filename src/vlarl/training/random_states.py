"""The random number generators of all ranks, in checkpoints.

Each rank has its own: torch's generator of the host, and that of its GPU if it has one. They drive the sampling inside
a pass, such as dropout. A checkpoint stores them by kind and rank:

    rng.cpu.0  rng.cuda.0  rng.cpu.1  rng.cuda.1 …        rng.cpu: in older checkpoints, rank 0's only

A rank without a state in the checkpoint, because it was written by fewer ranks or without a GPU, is seeded from the
run's seed and its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from vlarl.rollout.tasks import derive_seed
from vlarl.training.ranks import Ranks

PREFIX = "rng"
OLD_KEY = "rng.cpu"
_KINDS = ("cpu", "cuda")  # their indices keep the seeds of one rank's generators apart
_RANDOM_STATES = 3  # keeps them apart from seeds of other purposes (rollout/tasks.py)


class Generator(Protocol):
    """The part of `torch.Generator` that is used here."""

    def get_state(self) -> torch.Tensor:
        """Its state, [S] uint8 on the host."""
        ...

    def set_state(self, new_state: torch.Tensor) -> object:
        """Continue from such a state."""
        ...

    def manual_seed(self, seed: int) -> object:
        """Start from a seed."""
        ...


Generators = Callable[[torch.device], Mapping[str, Generator]]
"""The generators, by kind, of a learner on this device."""


def default_generators(device: torch.device) -> dict[str, Generator]:
    """Torch's default generators."""
    found: dict[str, Generator] = {"cpu": torch.default_generator}
    if device.type == "cuda":
        current = torch.cuda.current_device()  # creates the generators if necessary
        found["cuda"] = torch.cuda.default_generators[current if device.index is None else device.index]
    return found


def random_states(own: Mapping[str, Generator], ranks: Ranks) -> dict[str, torch.Tensor]:
    """The states of all ranks by key, on every rank; all ranks must call."""
    gathered = ranks.gather({kind: generator.get_state() for kind, generator in own.items()})
    return {f"{PREFIX}.{kind}.{rank}": state for rank, states in enumerate(gathered) for kind, state in states.items()}


def own_keys(own: Mapping[str, Generator], rank: int, stored: Collection[str]) -> dict[str, str]:
    """Kind -> the key of this rank's state, if the checkpoint has one."""
    wanted = {kind: f"{PREFIX}.{kind}.{rank}" for kind in own}
    if rank == 0 and OLD_KEY in stored:
        wanted["cpu"] = OLD_KEY
    return {kind: key for kind, key in wanted.items() if key in stored}


def restore_random_states(
    own: Mapping[str, Generator], stored: Mapping[str, torch.Tensor], rank: int, seed: int
) -> None:
    """Restore this rank's generators from their stored states, and seed those that have none."""
    keys = own_keys(own, rank, stored)
    for kind, generator in own.items():
        if kind in keys:
            generator.set_state(stored[keys[kind]])
        else:
            generator.manual_seed(derive_seed(seed, _RANDOM_STATES, rank, _KINDS.index(kind)) % 2**63)
