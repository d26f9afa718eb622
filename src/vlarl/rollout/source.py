"""Where the loop's rollouts come from: collected in turn with the update, or ahead of it.

    in turn     loop:             collect 1 │ update 1 │ collect 2 │ update 2 │ …

    ahead       rollout thread:   episodes of group after group, without a break …
                loop:                  │ update 1 │ update 2 │ …

`rollout/ahead.py` has the second. With `optim.rollouts_per_update` above 1, rollouts wait in the source until an update
is due.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from vlarl.types import Rollout, Trajectory

Collect = Callable[[int], Rollout]
"""Collects the rollout of an iteration."""


class RolloutSource(ABC):
    """Brings the rollouts of the iterations, in their order; a context manager around the loop."""

    def __init__(self) -> None:
        self._waiting: list[Trajectory] = []  # of rollouts that wait for the others of their update

    @abstractmethod
    def get(self, iteration: int) -> Rollout:
        """The rollout of this iteration."""

    def gather(self, rollout: Rollout, update_due: bool) -> list[Trajectory]:
        """What the update is trained on: everything that was gathered since the last one; nothing before it is due."""
        self._waiting += rollout.kept
        if not update_due:
            return []
        gathered, self._waiting = self._waiting, []
        return gathered

    @property
    def num_waiting(self) -> int:
        """Trajectories that wait for the update that they are trained on."""
        return len(self._waiting)

    def updated(self) -> None:
        """Call it once an iteration's update is done and the engine has the new weights."""
        return None

    def paused(self) -> AbstractContextManager[None]:
        """Inside the block no rollout uses the environments."""
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class RolloutsInTurn(RolloutSource):
    """Collects a rollout when the loop wants it."""

    def __init__(self, collect: Collect) -> None:
        super().__init__()
        self._collect = collect

    def get(self, iteration: int) -> Rollout:
        """The rollout of this iteration."""
        return self._collect(iteration)
