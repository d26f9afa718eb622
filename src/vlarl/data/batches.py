"""Batches of demonstrations for supervised training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from vlarl.data.demo_set import DemoSet
from vlarl.observability.machine import available_cores
from vlarl.policies.openvla.images import ImagePipeline
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.types import Observation

MAX_HELD_BYTES = 8 * 2**30  # of frames in memory; larger sets are read for each batch
SLAB = 256  # frames that are prepared at once


@dataclass(frozen=True)
class DemoBatch:
    """Demonstrated decisions: observations and their actions."""

    inputs: OpenVLAInputs
    actions: torch.Tensor  # [B, K, D] normalised
    token_ids: torch.Tensor  # [B, K*D] the tokens of these actions


class DemoBatches:
    """Demonstrations on the device, and random batches of them. Each set is normalised by its own statistics."""

    def __init__(self, demos: Sequence[DemoSet], policy: OpenVLAPolicy, device: torch.device) -> None:
        instructions = tuple(dict.fromkeys(text for part in demos for text in part.instructions))
        ids = [np.array([instructions.index(t) for t in part.instructions])[part.instruction_ids] for part in demos]
        self._instruction_ids = torch.from_numpy(np.concatenate(ids)).to(device)
        actions, proprio = [], []
        for part in demos:
            policy.use_statistics(None, part.name)
            chunks = part.chunks(np.arange(len(part)), policy.chunk_length)
            actions.append(policy.normalizer.normalize(chunks))
            if policy.config.use_proprio:
                proprio.append(policy.normalizer.normalize_proprio(part.proprio))
        self._actions = torch.from_numpy(np.concatenate(actions)).to(device)
        self._token_ids = torch.from_numpy(policy.codec.encode(np.concatenate(actions))).to(device)
        self._proprio = torch.from_numpy(np.concatenate(proprio)).to(device) if proprio else None
        self._prompts = _prompts(instructions, policy).to(device)
        self._frames = Frames(demos, policy, device)
        self._device = device

    def __len__(self) -> int:
        return len(self._instruction_ids)

    def sample(self, size: int, generator: torch.Generator) -> DemoBatch:
        """A random batch: the observations, and the demonstrator's actions."""
        rows = torch.randint(len(self), (size,), generator=generator)
        pixels = self._frames.take(rows).to(self._device).permute(0, 1, 4, 2, 3)
        rows = rows.to(self._device)
        which = self._instruction_ids[rows]
        proprio = None if self._proprio is None else self._proprio[rows]
        inputs = OpenVLAInputs(self._prompts.input_ids[which], self._prompts.attention_mask[which], pixels, proprio)
        return DemoBatch(inputs, self._actions[rows], self._token_ids[rows])


class Frames:
    """All frames, preprocessed for the policy: kept in memory where they fit, else read for each batch."""

    def __init__(
        self, demos: Sequence[DemoSet], policy: OpenVLAPolicy, device: torch.device, max_bytes: int = MAX_HELD_BYTES
    ) -> None:
        self._demos, self._policy = demos, policy
        self._ends = np.cumsum([len(part) for part in demos])
        self._readers = ThreadPoolExecutor(available_cores())
        self._held: torch.Tensor | None = None  # [N, I, H, W, 3]
        if int(self._ends[-1]) * policy.num_images * policy.image_size**2 * 3 <= max_bytes:
            parts = [self._all(part) for part in demos]
            self._held = parts[0] if len(parts) == 1 else torch.cat(parts)
            if device.type == "cuda":
                self._held = self._held.to(device)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, I, H, W, 3] the frames of some rows."""
        if self._held is not None:
            return self._held[rows.to(self._held.device)]
        sets = np.searchsorted(self._ends, rows.numpy(), side="right")
        starts = self._ends - [len(part) for part in self._demos]
        return self._processed((self._demos[i], int(row - starts[i])) for i, row in zip(sets, rows, strict=True))

    def _all(self, demos: DemoSet) -> torch.Tensor:
        """Every frame of a set; frames that were rendered for the policy need no preprocessing."""
        policy = self._policy
        if isinstance(demos.images, np.ndarray) and policy.processor.images == ImagePipeline():
            images = demos.images[:, : policy.num_images]
            if images.shape[2:4] == (policy.image_size, policy.image_size):
                return torch.from_numpy(images)
        slabs = (range(start, min(start + SLAB, len(demos))) for start in range(0, len(demos), SLAB))
        return torch.cat([self._processed((demos, row) for row in slab) for slab in slabs])

    def _processed(self, rows: Iterable[tuple[DemoSet, int]]) -> torch.Tensor:
        observations = list(self._readers.map(lambda row: row[0].observation(row[1]), rows))
        return self._policy.process(observations).pixels.permute(0, 1, 3, 4, 2)


def _prompts(instructions: Sequence[str], policy: OpenVLAPolicy) -> OpenVLAInputs:
    blank = np.zeros((policy.num_images, policy.image_size, policy.image_size, 3), np.uint8)
    state = np.zeros(policy.config.proprio_dim, np.float32)
    return policy.process([Observation(blank, state, instruction) for instruction in instructions])
