"""Which frame of which dataset each sample of a run is: a function of the seed and the sample's index.

    sample i ─► its dataset, by the weights ─► the dataset's next frame, in an order that is shuffled for every epoch

There is no state: a run that resumes at sample i reads what the undisturbed run would have read, and so does a run
with another number of ranks, each of which reads its own part of every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlarl.config.words import counted
from vlarl.rollout.epochs import Epochs
from vlarl.rollout.tasks import derive_seed
from vlarl.types import FloatArray, IntArray

BLOCK = 1024  # samples whose datasets are sampled at once: each block has every dataset as often as its weight says

_DATASETS, _FRAMES, _NOISE = 9, 10, 12  # keep these seeds different from those of rollout/tasks.py, augmentation.py


@dataclass(frozen=True)
class Drawn:
    """How often a dataset was sampled: `Drawn("toto", 0.25, 1000, 502, 0.251)`."""

    name: str
    weight: float  # of all weights, which sum to 1
    num_frames: int
    num_samples: int
    fraction: float  # of all samples

    @property
    def epochs(self) -> float:
        """How often each of its frames was sampled, on average."""
        return self.num_samples / self.num_frames


class MixtureSampler:
    """The samples of a run, by their indices.

    >>> sampler = MixtureSampler(sizes=[10, 20], weights=[3.0, 1.0], seed=0)
    >>> sampler.counts(1024).tolist()
    [768, 256]
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """`sizes`: frames of each dataset; `weights`: how often it is sampled, relative to the others."""
        if len(sizes) != len(weights) or not all(size > 0 for size in sizes) or not all(w > 0 for w in weights):
            raise ValueError(f"datasets of {list(sizes)} frames have the weights {list(weights)}")
        self.sizes, self._given = tuple(sizes), tuple(weights)
        self.weights: FloatArray = np.asarray(weights, np.float64) / np.sum(weights)
        self._bounds = np.cumsum(self.weights)[:-1]
        self._seed = seed
        self.noise_seed = derive_seed(seed, _NOISE)  # of what a loss samples, together with the sample's index
        self._orders = [Epochs(derive_seed(seed, _FRAMES, index), size) for index, size in enumerate(sizes)]
        self._before: tuple[int, IntArray] = (0, np.zeros(len(sizes), np.int64))  # samples before a block

    def __reduce__(self) -> tuple[type[MixtureSampler], tuple[Sequence[int], Sequence[float], int]]:
        """It travels between processes as what it is made of: its orders are kept in a cache that can't."""
        return type(self), (self.sizes, self._given, self._seed)

    def samples(self, first: int, count: int) -> tuple[IntArray, IntArray]:
        """Datasets and frames of samples `first` … `first + count - 1`."""
        datasets = self._datasets(first, count)
        frames = np.empty(count, np.int64)
        for index, before in enumerate(self.counts(first)):
            mine = np.flatnonzero(datasets == index)
            frames[mine] = self._frames(index, int(before) + np.arange(len(mine)))
        return datasets, frames

    def counts(self, position: int) -> IntArray:
        """How often each dataset was sampled before a position."""
        wanted, rest = divmod(position, BLOCK)
        block, counts = self._before
        if block > wanted:
            block, counts = 0, np.zeros(len(self.sizes), np.int64)
        while block < wanted:
            counts = counts + self._count(self._block(block))
            block += 1
        self._before = (block, counts)
        return counts + self._count(self._block(wanted)[:rest]) if rest else counts.copy()

    def _count(self, datasets: IntArray) -> IntArray:
        return np.bincount(datasets, minlength=len(self.sizes)).astype(np.int64)

    def _datasets(self, first: int, count: int) -> IntArray:
        blocks = range(first // BLOCK, (first + count - 1) // BLOCK + 1)
        skipped = first - blocks[0] * BLOCK if count else 0
        found: IntArray = np.concatenate([np.zeros(0, np.int64), *map(self._block, blocks)])[skipped : skipped + count]
        return found

    def _block(self, block: int) -> IntArray:
        """Datasets of a block: one sample of each of its equal parts of [0, 1), in random order."""
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, _DATASETS, block]))
        points = (rng.permutation(BLOCK) + rng.random(BLOCK)) / BLOCK
        return np.searchsorted(self._bounds, points, side="right").astype(np.int64)

    def _frames(self, index: int, positions: IntArray) -> IntArray:
        """The frames of a dataset at positions in its own sequence of epochs."""
        epochs, within = np.divmod(positions, self.sizes[index])
        frames = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            frames[here] = self._orders[index].order(int(epoch))[within[here]]
        return frames

    def drawn(self, names: Sequence[str], position: int) -> list[Drawn]:
        """What was sampled before a position."""
        counts = self.counts(position)
        return [
            Drawn(name, float(weight), size, int(count), float(count / max(position, 1)))
            for name, weight, size, count in zip(names, self.weights, self.sizes, counts, strict=True)
        ]


def table(drawn: Sequence[Drawn]) -> list[str]:
    """What was sampled, as lines of text."""
    width = max(len("dataset"), *(len(one.name) for one in drawn))
    total = sum(one.num_samples for one in drawn)
    lines = [f"sampled {counted(total, 'frame')}:", f"{'dataset':{width}}  weight  fraction  samples  epochs"]
    return lines + [
        f"{one.name:{width}}  {one.weight:6.2%}  {one.fraction:8.2%}  {one.num_samples:7,}  {one.epochs:6.2f}"
        for one in drawn
    ]
