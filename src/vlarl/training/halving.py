"""Microbatches that do not fit into the GPU's memory: they are halved, and the work on them begins again.

    attempt(work):  work ── of microbatches ──► guarded passes ──► results of all ranks
                      ▲                             │ one ran out of memory, on any rank
                      └── half as large ◄── what it held is freed; the others pass in turn, without result

What begins again is a whole annotation, or the gradient of a whole minibatch, which is set to zero first. So the result
is that of smaller microbatches from the beginning. They stay small for the rest of the run.

Ranks learn of it from the results that they exchange after every pass over a minibatch, so all of them halve together.
Where weights are sharded over several ranks, a pass waits for the other ranks in its middle: there a rank that runs out
of memory can't be helped, and its error says what to change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from vlarl.config.derive import microbatch_size
from vlarl.config.schema import OptimConfig
from vlarl.devices import free_cached_memory, is_out_of_memory, out_of_memory
from vlarl.training.ranks import Ranks, distribute

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class NoMemory:
    """Stands for the result of a pass that ran out of memory."""

    reason: str


class TooLargeError(Exception):
    """A microbatch did not fit into memory; it never leaves `Microbatches.attempt`."""

    def __init__(self, reason: str, largest: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.largest = largest  # rows of the largest of the microbatches


class Microbatches:
    """How large the microbatches are, and what happens when they are too large."""

    def __init__(
        self,
        optim: OptimConfig,
        ranks: Ranks,
        device: torch.device,
        sharded: bool,
        make_way: Callable[[], bool] = lambda: False,
    ) -> None:
        """`make_way` releases recordings of passes, which are made again, and says whether there were any."""
        self.optim = optim  # with the size as it is now
        self._retries = 0
        self._ranks = ranks
        self._device = device
        self._make_way = make_way if ranks.world_size == 1 else lambda: False  # others have none
        self._may_halve = not sharded or ranks.world_size == 1

    def attempt(self, work: Callable[[], Result]) -> Result:
        """The result of work on microbatches, which begins again with smaller ones as often as they are too large."""
        made_way = False
        while True:
            try:
                return work()
            except TooLargeError as error:
                found = TooLargeError(error.reason, error.largest)
            except torch.OutOfMemoryError as error:  # between the passes
                raise out_of_memory("the update", error) from error
            # After the error, whose traceback holds tensors. Once: the next try may make recordings that are as large.
            released = self._make_way() and not made_way
            made_way = True
            if released:
                log.info("the update ran out of memory: recorded passes make way for it, and are recorded again")
            else:
                self.optim = self._halved(found)
                free_cached_memory(self._device)
            self._retries += 1

    def distribute(
        self, pieces: Sequence[torch.Tensor], idle: torch.Tensor, work: Callable[[torch.Tensor], Result]
    ) -> list[Result]:
        """`ranks.distribute`; TooLargeError on every rank if the work on a microbatch ran out of memory on one."""
        lacking: list[NoMemory] = []

        def guarded(piece: torch.Tensor) -> Result | NoMemory:
            if not lacking:
                try:
                    return work(piece)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    if not self._may_halve:
                        raise out_of_memory("a pass over weights that several learners share", error) from None
                    if piece is idle:  # whose result is not read
                        raise out_of_memory("a learner without decisions of its own", error) from None
                    lacking.append(NoMemory(str(error)))
            return lacking[0]

        results: list[Result] = []
        for found in distribute(pieces, idle, guarded, self._ranks):
            if isinstance(found, NoMemory):
                raise TooLargeError(found.reason, max(len(piece) for piece in pieces))
            results.append(found)
        return results

    def take_retries(self) -> dict[str, float]:
        """How often work began again since this was last called, as metrics; empty if it never did."""
        retries, self._retries = self._retries, 0
        return {"oom_retries": float(retries)} if retries else {}

    def _halved(self, error: TooLargeError) -> OptimConfig:
        """The options with microbatches of half the size."""
        if error.largest == 1:
            raise out_of_memory("the update of a single decision", error.reason) from None
        tokens, rows = self.optim.microbatch_tokens, min(microbatch_size(self.optim), error.largest)
        if tokens is not None:
            said, smaller = f"{tokens} tokens; from here on {tokens // 2}", {"microbatch_tokens": tokens // 2}
        else:
            said, smaller = f"{rows} decisions; from here on {rows // 2}", {"microbatch_size": rows // 2}
        if self._ranks.rank == 0:
            log.warning("the update ran out of memory with microbatches of %s. %s", said, error.reason.split("\n")[0])
        return self.optim.model_copy(update=smaller)


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Around what can't be done in smaller parts: running out of memory there ends the run with what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(doing, error) from error
