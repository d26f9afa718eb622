"""Demonstrations as flat arrays, which supervised training samples from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vlarl.envs.base import Demonstration
from vlarl.types import FloatArray, IntArray, Observation, UInt8Array

BoolArray = NDArray[np.bool_]


class StoredFrames(Protocol):
    """Frames that are read on access."""

    shape: tuple[int, ...]  # (N, I, H, W, 3)

    def __getitem__(self, index: int) -> UInt8Array:
        """[I, H, W, 3] one of them."""
        ...

    def select(self, rows: IntArray) -> StoredFrames:
        """Some of them, not read yet."""
        ...


@dataclass(frozen=True)
class DemoSet:
    """N frames of E episodes, one after the other."""

    name: str  # of the suite or dataset; a policy's statistics for it have this key
    images: UInt8Array | StoredFrames  # [N, I, H, W, 3]
    proprio: FloatArray  # [N, P]
    actions: FloatArray  # [N, D] as the demonstrator intended them; noise was added to what it executed
    instruction_ids: IntArray  # [N] index into `instructions`
    instructions: tuple[str, ...]
    episode_lengths: IntArray  # [E]
    success: BoolArray  # [E]
    action_mask: tuple[bool, ...] | None = None  # dimensions that are normalised; None: that follows from the actions

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays in memory."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    @property
    def episode_starts(self) -> IntArray:
        """[E] the first frame of each episode."""
        return np.cumsum(self.episode_lengths) - self.episode_lengths

    def observation(self, index: int) -> Observation:
        """The demonstrator's observation at a frame."""
        instruction = self.instructions[int(self.instruction_ids[index])]
        return Observation(self.images[index], self.proprio[index], instruction)

    def chunks(self, indices: IntArray, num_actions: int) -> FloatArray:
        """[n, K, D] the actions from each frame on; past the episode's end, no motion and the last gripper command."""
        starts = self.episode_starts
        episode = np.searchsorted(starts, indices, side="right") - 1
        last = (starts + self.episode_lengths - 1)[episode]
        wanted = indices[:, None] + np.arange(num_actions)
        chunk: FloatArray = self.actions[np.minimum(wanted, last[:, None])]
        chunk[..., :-1] *= (wanted <= last[:, None])[..., None]
        return chunk

    def successful(self) -> DemoSet:
        """The episodes that reached their goal."""
        return self.episodes(self.success)

    def episodes(self, chosen: BoolArray) -> DemoSet:
        """The chosen ones [E] of its episodes."""
        if chosen.all():
            return self
        frames = np.flatnonzero(np.repeat(chosen, self.episode_lengths))
        images = self.images[frames] if isinstance(self.images, np.ndarray) else self.images.select(frames)
        return DemoSet(
            self.name,
            images,
            self.proprio[frames],
            self.actions[frames],
            self.instruction_ids[frames],
            self.instructions,
            self.episode_lengths[chosen],
            self.success[chosen],
            self.action_mask,
        )


def from_demonstrations(name: str, demonstrations: Iterable[Demonstration]) -> DemoSet:
    """A set of all episodes that experts played."""
    return join(
        [
            DemoSet(
                name,
                played.images,
                played.proprio,
                played.actions,
                np.zeros(len(played.actions), np.int64),
                (played.instruction,),
                np.array([len(played.actions)]),
                np.array([played.success]),
            )
            for played in demonstrations
        ]
    )


def join(parts: Sequence[DemoSet]) -> DemoSet:
    """One set out of several of one name, all in memory; equal instructions share one index."""
    instructions = tuple(dict.fromkeys(text for part in parts for text in part.instructions))
    ids = [np.array([instructions.index(t) for t in part.instructions])[part.instruction_ids] for part in parts]
    return DemoSet(
        name=parts[0].name,
        images=np.concatenate([part.images for part in parts if isinstance(part.images, np.ndarray)]),
        proprio=np.concatenate([part.proprio for part in parts]),
        actions=np.concatenate([part.actions for part in parts]),
        instruction_ids=np.concatenate(ids),
        instructions=instructions,
        episode_lengths=np.concatenate([part.episode_lengths for part in parts]),
        success=np.concatenate([part.success for part in parts]),
    )
