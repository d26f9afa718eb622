"""Batches of demonstrations for supervised training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from vlarl.data.demo_set import DemoSet
from vlarl.data.mixtures import MixtureSampler
from vlarl.decisions import TensorRows
from vlarl.observability.machine import available_cores
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.training.sft import DemoBatch

MAX_HELD_BYTES = 8 * 2**30  # in memory; frames of larger sets are read for each batch
SLAB = 256  # frames that are prepared at once


class DemoBatches:
    """Demonstrations on the device, and batches of them. Each set is normalised by its own statistics, or all by the
    pooled ones, as the policy has it."""

    def __init__(
        self,
        demos: Sequence[DemoSet],
        policy: SupervisedPolicy,
        device: torch.device,
        sampler: MixtureSampler,
        max_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        """`max_bytes` of rows and frames are kept in memory; frames of larger sets are read for each batch."""
        parts: list[TensorRows] = []
        for part in demos:
            policy.use_statistics(None, part.name)
            instructions = [part.instructions[index] for index in part.instruction_ids]
            chunks = part.chunks(np.arange(len(part)), policy.num_steps)
            parts.append(policy.demo_rows(instructions, part.proprio, chunks))
        self._rows = type(parts[0]).cat(parts).to(device)
        own = sum(tensor.nbytes for tensor in self._rows.tensors())
        self._frames = Frames(demos, policy, device, max_bytes - own)
        self._starts = np.cumsum([0, *(len(part) for part in demos)])
        self._policy, self._sampler, self._device = policy, sampler, device

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, first: int, size: int) -> DemoBatch:
        """Samples `first` … `first + size - 1` of the run: the observations, and the demonstrator's actions."""
        datasets, frames = self._sampler.samples(first, size)
        rows = torch.from_numpy(self._starts[datasets] + frames)
        found = self._policy.with_noise(
            self._rows.rows(rows.to(self._device)), self._sampler.noise_seed, range(first, first + size)
        )
        return DemoBatch(found, self._frames.take(rows).to(self._device))


class Frames:
    """All frames, preprocessed for the policy: kept in memory where they fit, else read for each batch."""

    def __init__(
        self, demos: Sequence[DemoSet], policy: SupervisedPolicy, device: torch.device, max_bytes: int = MAX_HELD_BYTES
    ) -> None:
        self._demos, self._policy = demos, policy
        self._ends = np.cumsum([len(part) for part in demos])
        self._readers = ThreadPoolExecutor(available_cores())
        self._held: torch.Tensor | None = None  # [N, …]
        if sum(len(part) * policy.demo_frames([part.images[0]]).nbytes for part in demos) <= max_bytes:
            parts = [self._all(part) for part in demos]
            self._held = parts[0] if len(parts) == 1 else torch.cat(parts)
            if device.type == "cuda":
                self._held = self._held.to(device)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, …] the frames of some rows."""
        if self._held is not None:
            return self._held[rows.to(self._held.device)]
        sets = np.searchsorted(self._ends, rows.numpy(), side="right")
        starts = self._ends - [len(part) for part in self._demos]
        return self._processed((self._demos[i], int(row - starts[i])) for i, row in zip(sets, rows, strict=True))

    def _all(self, demos: DemoSet) -> torch.Tensor:
        """Every frame of a set; only a slab of stored frames is in memory before it is processed."""
        if isinstance(demos.images, np.ndarray):
            return self._policy.demo_frames(demos.images)
        slabs = (range(start, min(start + SLAB, len(demos))) for start in range(0, len(demos), SLAB))
        return torch.cat([self._processed((demos, row) for row in slab) for slab in slabs])

    def _processed(self, rows: Iterable[tuple[DemoSet, int]]) -> torch.Tensor:
        return self._policy.demo_frames(list(self._readers.map(lambda row: row[0].images[row[1]], rows)))
