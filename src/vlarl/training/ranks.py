"""The processes that train one policy together, and how they share work.

Every rank runs the same program on the same batch. Work comes in pieces, mostly microbatches, which are assigned to the
ranks in turn; a rank without a piece works on an idle one, since a sharded model needs all ranks in every pass. Then
all ranks get all results, in the order in which one process would have computed them:

    pieces   0  1  2  3  4         rank 0:  0  2  4
                                   rank 1:  1  3  idle      gather ─► 0 1 2 3 4 on both

Every decision (an early stop, a refused step) is made from such results, and so is the same on all ranks. A rank waits
for the others in every call below, but no longer than the deadline that it joined with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from vlarl.errors import VlarlError

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Ranks(Protocol):
    """Collective operations of one of the processes. All ranks must make every call, in the same order."""

    rank: int
    world_size: int

    def gather(self, own: Result) -> list[Result]:
        """The values of all ranks, in the order of ranks, on every rank; they are pickled."""
        ...

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by the sum of all ranks' tensors, in place."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        ...


class SingleRank:
    """The only process."""

    rank = 0
    world_size = 1

    def gather(self, own: Result) -> list[Result]:
        """Its own."""
        return [own]

    def sum(self, tensor: torch.Tensor) -> None:
        """The tensor is the sum."""

    def any(self, flag: bool) -> bool:
        """Its own flag."""
        return flag


class ProcessGroup:
    """One of several processes, over torch.distributed: gloo between hosts' memories, nccl between GPUs."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    @classmethod
    def join(
        cls, rank: int, world_size: int, address: str, port: int, device: torch.device, deadline: timedelta
    ) -> ProcessGroup:
        """Join the other ranks at rank 0's address; no later call waits for them longer than `deadline`."""
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"  # objects, counters and offloaded shards are sent between hosts' memories
        dist.init_process_group(
            backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size, timeout=deadline
        )
        return cls()

    def gather(self, own: Result) -> list[Result]:
        """The values of all ranks, in the order of ranks, on every rank; they are pickled."""
        everything: list[Result | None] = [None] * self.world_size
        dist.all_gather_object(everything, own)
        return cast(list[Result], everything)

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by the sum of all ranks' tensors, in place."""
        dist.all_reduce(tensor)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        raised = torch.tensor(int(flag))
        dist.all_reduce(raised)
        return bool(raised)


def distribute(pieces: Sequence[Piece], idle: Piece, work: Callable[[Piece], Result], ranks: Ranks) -> list[Result]:
    """The results of `work` on all pieces, in order, on every rank; each piece is processed by one of them.

    All ranks call `work` equally often: those without a piece left call it with `idle` and drop the result.
    """
    own = []
    for first in range(0, len(pieces), ranks.world_size):
        index = first + ranks.rank
        own.append(work(pieces[index] if index < len(pieces) else idle))
    turns = zip(*ranks.gather(own), strict=True)
    return [result for turn in turns for result in turn][: len(pieces)]


def on_first(ranks: Ranks, work: Callable[[], None]) -> None:
    """Let rank 0 do the work while the others wait; if it fails, all ranks fail."""
    on_each(ranks, lambda: work() if ranks.rank == 0 else None)


def on_each(ranks: Ranks, work: Callable[[], Result]) -> list[Result]:
    """The result of each rank's work, in the order of ranks, on every rank; if one fails, all ranks fail."""
    problem: Exception | None = None
    own: list[Result] = []
    try:
        own.append(work())
    except Exception as error:  # a process boundary: the others must not wait for a result that never comes
        problem = error
    outcomes = ranks.gather((own, None if problem is None else f"{problem or type(problem).__name__}"))
    if problem is not None:
        raise problem
    for rank, (_, reason) in enumerate(outcomes):
        if reason is not None:
            raise VlarlError(f"rank {rank} failed: {reason}")
    return [result for results, _ in outcomes for result in results]
