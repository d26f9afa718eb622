"""What fits into a GPU's memory: pure arithmetic on a family's estimates, before anything is loaded.

    limit  =  what tensors may take, the CUDA context already subtracted
    kept   =  weights, adapters, gradients, optimizer state and copies of adapters; SLACK
    update =  kept + MARGIN x what a microbatch keeps for its backward pass
    rollout = kept + MARGIN x what a pass of decisions needs
    recordings keep as much as the largest of the passes that are recorded, which share a pool

The update is planned first: the largest microbatch that fits, with recomputed layers only where the passes would be too
small without. Then the largest pass of decisions. Recordings (CUDA graphs) stay where they fit beside both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vlarl.config.derive import LARGEST_MICROBATCH
from vlarl.config.words import counted
from vlarl.policies.family import MemoryEstimate

GIB = 2**30
MIB = 2**20
SLACK = GIB // 4
"""Bytes lost between tensors that stay: weights that moved to where their adapters are appended leave gaps."""
MARGIN = 1.1
"""Tensors of a pass leave gaps between them, and an estimate may be 4% off."""
BUSY_ROWS = 32
"""Decisions in a pass that keep a GPU busy: larger passes are hardly faster, smaller ones clearly slower (measured on
OpenVLA-7B: 13.7 samples/s in passes of 8, 32.4 in passes of 32)."""

Recorded = Literal["none", "kept", "released"]


@dataclass(frozen=True)
class Estimates:
    """What a family says of a checkpoint, and what the configuration adds to it."""

    rollout: Callable[[int], MemoryEstimate]  # by decisions in a pass
    update: Callable[[int, bool], MemoryEstimate]  # by decisions in a microbatch, and whether layers are recomputed
    copies: int = 0  # bytes of averages, references and critics that are copies of what is trained
    networks: int = 1  # whose activations wait for the backward pass together: a separate critic is a second one


@dataclass(frozen=True)
class Wanted:
    """What the configuration says; None: the plan chooses."""

    slots: int  # decisions that may wait at a time
    microbatch_size: int | None = None
    gradient_checkpointing: bool | None = None
    batch_size: int | None = None
    by_tokens: bool = False  # microbatches are measured in tokens: their size is not planned
    recorded: bool = True
    recorded_update: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of passes that fit, and the bytes that they take by estimate."""

    limit: int
    kept: int  # between passes
    update: int  # at the peak of an update
    rollout: int  # at the peak of a rollout
    recordings: int  # of recorded passes, beside one that is not recorded yet
    microbatch_size: int | None  # None: measured in tokens, as configured
    gradient_checkpointing: bool
    batch_size: int | None  # None: all that wait
    recorded: Recorded
    fits: bool
    advice: tuple[str, ...] = ()  # what to change where it does not fit

    @property
    def is_hopeless(self) -> bool:
        """Whether not even what stays between passes fits."""
        return self.kept > self.limit

    def lines(self) -> list[str]:
        """The plan in words."""
        layers = "recomputed in the backward pass" if self.gradient_checkpointing else "not recomputed"
        size, least = (f"of {self.microbatch_size}", "")
        if self.microbatch_size is None:
            size, least = "as optim.microbatch_tokens says", "at least "
        batch = "of all decisions that wait"
        if self.batch_size is not None:
            batch = f"of at most {counted(self.batch_size, 'decision')}"
        said = {
            "none": "",
            "kept": f"; CUDA graphs keep {_size(self.recordings)}",
            "released": "; CUDA graphs are released around every update and made again",
        }
        return [
            f"memory for tensors: {_size(self.limit)}; weights, adapters and optimizer state take {_size(self.kept)}",
            f"update: microbatches {size}, layers {layers}: {least}{_size(self.update)} by estimate",
            f"rollout: passes {batch}: {_size(self.rollout)} by estimate{said[self.recorded]}",
        ] + ([] if self.fits else [f"by estimate that does not fit: {', or '.join(self.advice)}"])

    def to_json(self) -> dict[str, Any]:
        """The same as JSON, in bytes."""
        return asdict(self)


def plan_memory(limit: int, estimates: Estimates, wanted: Wanted) -> MemoryPlan:
    """The sizes to use where tensors may take `limit` bytes; those that are given stay as they are, fit or not."""
    smallest = estimates.update(1, True)
    kept = smallest.weights + smallest.lasting + estimates.copies + SLACK

    def of_update(size: int, recompute: bool) -> int:
        return kept + round(MARGIN * estimates.networks * estimates.update(size, recompute).activations)

    def of_pass(batch: int) -> int:
        needed = estimates.rollout(_power_of_two(batch) if wanted.recorded else batch)
        return round(MARGIN * (needed.activations + needed.cache))

    microbatch, recompute = _update_sizes(limit, of_update, wanted)
    batch = wanted.batch_size or wanted.slots
    if wanted.batch_size is None and kept + of_pass(batch) > limit:
        batch = _largest(_power_of_two(batch) // 2, lambda size: kept + of_pass(size) <= limit) or 1
    update, recordings = of_update(microbatch, recompute), of_pass(batch) if wanted.recorded else 0
    if wanted.recorded_update:
        recordings = max(recordings, update - kept)  # all share one pool
    recorded: Recorded = "none"
    if recordings:
        recorded = "kept" if max(update, kept + of_pass(batch)) + recordings <= limit else "released"
    return MemoryPlan(
        limit=limit,
        kept=kept,
        update=update,
        rollout=kept + of_pass(batch) + (recordings if recorded == "kept" else 0),
        recordings=recordings,
        microbatch_size=None if wanted.by_tokens else microbatch,
        gradient_checkpointing=recompute,
        batch_size=None if wanted.batch_size is None and batch >= wanted.slots else batch,
        recorded=recorded,
        fits=max(update, kept + of_pass(batch)) <= limit,
    )


def _update_sizes(limit: int, of_update: Callable[[int, bool], int], wanted: Wanted) -> tuple[int, bool]:
    """The size of a microbatch, and whether layers are recomputed, which costs a third forward pass but lets larger
    microbatches fit."""

    def largest(recompute: bool) -> int:
        if wanted.microbatch_size is not None:
            return wanted.microbatch_size if of_update(wanted.microbatch_size, recompute) <= limit else 0
        return _largest(LARGEST_MICROBATCH, lambda size: of_update(size, recompute) <= limit)

    if wanted.by_tokens:
        return 1, bool(wanted.gradient_checkpointing)
    recomputed = largest(True)
    recompute = wanted.gradient_checkpointing
    if recompute is None:
        kept = largest(False)
        recompute = kept == 0 or kept < min(recomputed, BUSY_ROWS)
    chosen = recomputed if recompute else largest(False)
    return wanted.microbatch_size or chosen or 1, recompute


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest of `most`, its half, the half of that…, that fits; 0 if not even 1 does."""
    while most > 0 and not fits(most):
        most //= 2
    return most


def _power_of_two(size: int) -> int:
    """The size rounded up to a power of two, as recorded batches are."""
    return 1 << (size - 1).bit_length()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"
