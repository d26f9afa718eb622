"""Observations, read beside their environments by the policy without its weights.

Environments ── outcomes ──► BesideReader ── Seen: outcomes without pixels ──► the driver
                                 └── inputs, in pieces; images, where they are read later ──► the object store
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray
import torch
from ray._common.utils import get_default_ray_temp_dir

from vlarl.config.schema import Config
from vlarl.decisions import Row, TensorRows
from vlarl.distributed.store_size import RowBytes
from vlarl.distributed.stored_rows import StoredBatch, StoredObservation
from vlarl.envs.base import Actions, Record, SuiteSpec
from vlarl.errors import UsageError
from vlarl.policies.load import load_acting_policy
from vlarl.types import (
    BoolArray,
    ChunkOutcome,
    FloatArray,
    IntArray,
    Observation,
    Prompt,
    Task,
    UInt8Array,
    pixel_digest,
)

PIECE_BYTES = 8 << 20  # of an object with inputs, about: each one costs its owner, the driver, a tenth of a millisecond


NO_STEPS: Mapping[int, Any] = {}

Column = FloatArray | list[FloatArray]
"""An array for each outcome: the rows of one array, or a list where their shapes differ."""


class Environments(Protocol):
    """What a worker runs: some slots, numbered from 0."""

    def spec(self) -> SuiteSpec: ...  # noqa: D102

    def reset(self, slots: list[int], tasks: list[Task], record: Record) -> list[ChunkOutcome]: ...  # noqa: D102

    def step(self, slots: list[int], actions: Actions, record: Record) -> list[ChunkOutcome]: ...  # noqa: D102

    def frame(self, slot: int) -> UInt8Array: ...  # noqa: D102


@dataclass(frozen=True)
class Reading:
    """How environment workers let the policy read what their environments show."""

    config: Config
    keeps_images: bool  # store the images as well, for a reward or for samples


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of a call without pixels, by column: the driver reads a few arrays, and not some for each slot."""

    rewards: Column  # [K] each
    num_executed: IntArray  # [B]
    flags: BoolArray  # [B, 3] terminated, truncated, success
    frames: list[tuple[UInt8Array, ...]]
    errors: list[str | None]
    images: list[UInt8Array]  # without any image
    proprio: Column
    instructions: list[str]
    prompts: list[Prompt | None]  # without their pixels
    digests: list[bytes]  # b"" where they are not needed
    passed: list[int]  # how many observations were passed, where steps are recorded

    @classmethod
    def of(cls, outcomes: Sequence[ChunkOutcome], digest: Callable[[UInt8Array], bytes]) -> Outcomes:
        """These outcomes, with the digest of the images that are left out."""
        seen = [outcome.observation for outcome in outcomes]
        blank = {each.images.shape: each.images[:0].copy() for each in seen}  # one array for all that are alike
        return cls(
            rewards=_column([outcome.rewards for outcome in outcomes]),
            num_executed=np.array([outcome.num_executed for outcome in outcomes]),
            flags=np.array([(each.terminated, each.truncated, each.success) for each in outcomes]),
            frames=[outcome.frames for outcome in outcomes],
            errors=[outcome.error for outcome in outcomes],
            images=[blank[each.images.shape] for each in seen],
            proprio=_column([each.proprio for each in seen]),
            instructions=[each.instruction for each in seen],
            prompts=[None if each.prompt is None else each.prompt.without_images() for each in seen],
            digests=[digest(each.images) for each in seen],
            passed=[len(outcome.passed) for outcome in outcomes],
        )

    def apart(
        self, inputs: Mapping[int, Row[TensorRows]], images: Any, steps: Mapping[int, Any] = NO_STEPS
    ) -> list[ChunkOutcome]:
        """The outcomes one by one, with the inputs of each index; `images` names the list of observations with their
        images, and is None where it is not kept. `steps` name, by index, the lists of what was passed and the last."""
        counted, flagged = self.num_executed.tolist(), self.flags.tolist()
        moved = zip(self.rewards, counted, flagged, self.frames, self.errors, strict=True)
        shown = zip(self.images, self.proprio, self.instructions, self.prompts, self.digests, self.passed, strict=True)
        outcomes = []
        for index, (move, (blank, proprio, text, prompt, digest, passed)) in enumerate(zip(moved, shown, strict=True)):
            rewards, num_executed, (terminated, truncated, success), frames, error = move
            fetches = [StoredObservation(steps[index], each) for each in range(passed + 1)] if index in steps else []
            last = [StoredObservation(images, index)] if images is not None else [None]
            fetch = (fetches or last)[-1]
            seen = Observation(blank, proprio, text, prompt, inputs.get(index), fetch, digest)
            before = tuple(Observation(blank, proprio, text, fetch=each) for each in fetches[:-1])
            outcomes.append(
                ChunkOutcome(rewards, num_executed, terminated, truncated, success, seen, frames, error, before)
            )
        return outcomes


@dataclass(frozen=True)
class Seen:
    """What the driver gets of a call: outcomes without pixels, and what of them is stored.

    The inputs are in pieces, objects of about PIECE_BYTES: a rank fetches the piece of a row that it trains on, and not
    the rows of all slots.
    """

    outcomes: Outcomes
    pieces: list[list[int]]  # the outcomes whose inputs are the rows of each piece; none of an episode that has ended
    lengths: list[tuple[int, ...] | None]  # of the rows of each piece, as `TensorRows.lengths`
    machine: str
    keeps_images: bool
    each: RowBytes  # what one of them takes in the store
    recorded: tuple[int, ...] = ()  # outcomes whose steps are stored, each in an object: few of them may be read

    def named(self, stored: tuple[Any, ...]) -> list[ChunkOutcome]:
        """The outcomes with the names of what is stored: the pieces, the list of observations if it is kept, steps."""
        rows: dict[int, Row[TensorRows]] = {}
        for reference, piece, lengths in zip(stored[: len(self.pieces)], self.pieces, self.lengths, strict=True):
            batch = StoredBatch(reference, len(piece), lengths, self.machine, len(piece) * self.each.inputs)
            rows |= {outcome: Row(batch, row) for row, outcome in enumerate(piece)}
        others = stored[len(self.pieces) :]
        images, *steps = others if self.keeps_images else (None, *others)
        return self.outcomes.apart(rows, images, dict(zip(self.recorded, steps, strict=True)))


Stored = tuple[Any, ...]
"""A `Seen`, the pieces of the inputs, the list of observations with images where they are kept, and recorded steps."""


class BesideReader:
    """Environments whose observations are processed beside them, by the policy without its weights."""

    def __init__(self, environments: Environments, reading: Reading) -> None:
        self._environments = environments
        self._keeps_images = reading.keeps_images
        self._digests = reading.config.rollout.num_steps is not None  # episodes are brought back to an observation
        # From `policy.path`, also in a run that is resumed: reading needs nothing that is trained, and the checkpoint
        # may be gone when a worker is replaced.
        self._policy = load_acting_policy(reading.config, None, torch.device("meta"))
        self._machine = ray.get_runtime_context().get_node_id()

    def spec(self) -> SuiteSpec:
        """The suite."""
        return self._environments.spec()

    def frame(self, slot: int) -> UInt8Array:
        """A frame of a slot."""
        return self._environments.frame(slot)

    def reset(self, slots: list[int], tasks: list[Task], record: Record, num_pieces: int) -> Stored:
        """Start each task in its slot, and read what it shows."""
        return self._read(slots, self._environments.reset(slots, tasks, record), record, num_pieces)

    def step(self, slots: list[int], actions: Actions, record: Record, num_pieces: int) -> Stored:
        """Run one chunk in each slot, and read what it shows."""
        return self._read(slots, self._environments.step(slots, actions, record), record, num_pieces)

    def _read(self, slots: list[int], outcomes: list[ChunkOutcome], record: Record, num_pieces: int) -> Stored:
        index = [i for i, outcome in enumerate(outcomes) if not outcome.terminated and outcome.error is None]
        seen = [outcome.observation for outcome in outcomes]
        try:
            inputs = self._policy.process([seen[i] for i in index]) if index else None
        except ValueError as error:
            suite = self.spec().name
            raise UsageError(f"policy.path: the policy can't read what {suite} shows it: {error}") from error
        splits = [split.tolist() for split in np.array_split(np.arange(len(index)), num_pieces)]
        pieces = [None if inputs is None else inputs.rows(slice(*_bounds(split))) for split in splits]
        lengths = [
            None if piece is None or piece.lengths is None else tuple(piece.lengths.tolist()) for piece in pieces
        ]
        blank = Outcomes.of(outcomes, pixel_digest if self._digests else lambda images: b"")
        whole = [seen] if self._keeps_images else []
        recorded = tuple(i for i, slot in enumerate(slots) if slot in record.steps)
        steps = [[*outcomes[i].passed, seen[i]] for i in recorded]
        each = RowBytes(
            0 if inputs is None else sum(tensor.nbytes for tensor in inputs.tensors()) // len(index),
            sum(_pixel_bytes(observation) for observation in seen) // len(seen) if self._keeps_images else 0,
        )
        members = [[index[row] for row in split] for split in splits]
        read = Seen(blank, members, lengths, self._machine, self._keeps_images, each, recorded)
        return (read, *pieces, *whole, *steps)

    def machine(self) -> tuple[str, int]:
        """Ray's id of this machine's node, and the bytes that are free on the disk that its store spills to."""
        return self._machine, shutil.disk_usage(get_default_ray_temp_dir()).free


def _column(arrays: list[FloatArray]) -> Column:
    """The arrays as one where they are alike; those of a reset or a failure have no rewards."""
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays


def _bounds(rows: list[int]) -> tuple[int, int]:
    return (rows[0], rows[-1] + 1) if rows else (0, 0)


def _pixel_bytes(seen: Observation) -> int:
    prompt = () if seen.prompt is None else (*seen.prompt.images, *seen.prompt.videos)
    return seen.images.nbytes + sum(image.nbytes for image in prompt)
