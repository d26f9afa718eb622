"""What a reward model is trained on, as samples that are encoded when they are used.

pairs, steps   rows of a file (reward_rows.py)
episodes       frames of recorded or played episodes; a frame is as good as the success that follows is near
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from vlarl.config.words import counted
from vlarl.data.demo_set import DemoSet
from vlarl.data.recorded_demos import is_in_fraction
from vlarl.data.reward_rows import PATH, PreferenceRows, StepRows
from vlarl.errors import UsageError
from vlarl.rewards.preferences import Judged, LabelRows, PairRows, auc
from vlarl.rewards.reward_model import Candidate, RewardModel, state_candidate
from vlarl.types import BoolArray, FloatArray, IntArray


class Samples(Protocol):
    """Labelled samples by index."""

    @property
    def name(self) -> str:
        """Of the data."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int, model: RewardModel) -> Judged:
        """A sample as the model reads it, a batch of one."""
        ...

    def measured(self, count: int) -> IntArray:
        """The samples that a validation scores: about so many, evenly spaced, and those that `agreement` needs."""
        ...

    def agreement(self, indices: IntArray, values: FloatArray) -> dict[str, float]:
        """How well the values of some samples (`Judged.values`) agree with their labels."""
        ...


def evenly(total: int, count: int) -> IntArray:
    """So many of the indices below `total`, or all of them, evenly spaced."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))


@dataclass(frozen=True)
class Pairs:
    """Pairs of responses."""

    rows: PreferenceRows
    chosen_rows: IntArray  # [N] which of the rows
    name: str = "pairs"

    def __len__(self) -> int:
        return len(self.chosen_rows)

    def row(self, index: int, model: RewardModel) -> PairRows:
        """The pair of a row."""
        row = int(self.chosen_rows[index])
        both = model.read(self.rows.candidates(row, self.rows.contents[row]))  # their prompt is processed once
        return PairRows(both.rows(slice(0, 1)), both.rows(slice(1, 2)))

    def measured(self, count: int) -> IntArray:
        """Evenly spaced pairs."""
        return evenly(len(self), count)

    def agreement(self, indices: IntArray, values: FloatArray) -> dict[str, float]:
        """The fraction of the pairs whose chosen response scores higher."""
        return {"accuracy": float((values > 0).mean())}


class Labelled:
    """Samples with labels from 0 to 1; one above 1/2 counts as good."""

    name: str
    labels: FloatArray  # [N]

    def __len__(self) -> int:
        return len(self.labels)

    def candidate(self, index: int) -> Candidate:
        """What is scored."""
        raise NotImplementedError

    def row(self, index: int, model: RewardModel) -> LabelRows:
        """A sample with its label."""
        return LabelRows(model.read([self.candidate(index)]), torch.from_numpy(self.labels[index : index + 1]))

    def measured(self, count: int) -> IntArray:
        """Evenly spaced samples."""
        return evenly(len(self), count)

    def agreement(self, indices: IntArray, values: FloatArray) -> dict[str, float]:
        """How often good samples score higher than bad ones, and the fraction on the right side of a half."""
        return ranked(values, self.labels[indices] > 0.5)


class Steps(Labelled):
    """Every step of every row: the response up to there."""

    def __init__(self, rows: StepRows, chosen_rows: IntArray) -> None:
        self.name, self._rows = "steps", rows
        self._steps = [(int(row), step) for row in chosen_rows for step in range(len(rows.contents[row][0]))]
        self.labels = np.array([rows.contents[row][1][step] for row, step in self._steps], np.float32)

    def candidate(self, index: int) -> Candidate:
        """A prompt with the beginning of a response."""
        row, step = self._steps[index]
        return self._rows.candidates(row, self._rows.contents[row][0][step : step + 1])[0]


class EpisodeStates(Labelled):
    """Frames of episodes, evenly spaced, with the first and the last one of each.

    A frame of an episode that succeeds is labelled `discount` to the power of the steps that follow it; one of an
    episode that fails, 0.
    """

    def __init__(self, demos: DemoSet, per_episode: int, discount: float, image_size: int) -> None:
        """`image_size`: side of the views in pixels."""
        self.name, self._demos, self._image_size = demos.name, demos, image_size
        picked = [evenly(length, per_episode) for length in demos.episode_lengths.tolist()]
        left = np.concatenate([length - 1 - steps for length, steps in zip(demos.episode_lengths, picked, strict=True)])
        self._frames = np.concatenate([at + steps for at, steps in zip(demos.episode_starts, picked, strict=True)])
        self.is_success: BoolArray = np.repeat(demos.success, [len(steps) for steps in picked])
        self.is_last: BoolArray = left == 0
        self.labels = np.where(self.is_success, discount**left, 0.0).astype(np.float32)

    def candidate(self, index: int) -> Candidate:
        """The agent's view and the instruction."""
        seen = self._demos.observation(int(self._frames[index]))
        return state_candidate(seen.images[0], seen.instruction, self._image_size)

    def measured(self, count: int) -> IntArray:
        """Evenly spaced frames, and the last one of every episode."""
        return np.union1d(evenly(len(self), count), np.flatnonzero(self.is_last))

    def agreement(self, indices: IntArray, values: FloatArray) -> dict[str, float]:
        """How often the last frame of a success scores higher than that of a failure."""
        last = self.is_last[indices]
        return ranked(values[last], self.is_success[indices][last])


def ranked(values: FloatArray, is_good: BoolArray) -> dict[str, float]:
    """The area under the ROC curve, and the accuracy of the sign."""
    return {"auc": auc(values, is_good), "accuracy": float(((values > 0) == is_good).mean())}


def refuse_one_kind(is_good: BoolArray, what: str, remedy: str) -> None:
    """Refuse labels that don't differ: there would be nothing to learn, and nothing to rank."""
    if is_good.all() or not is_good.any():
        raise UsageError(f"{what} are all {'good' if is_good.all() else 'bad'}, and both kinds are needed: {remedy}")


def split_rows(rows: PreferenceRows | StepRows, fraction: float) -> tuple[IntArray, IntArray]:
    """The rows to train on and those that are held out; a hash of a row's prompt decides."""
    held = np.array([fraction > 0 and is_in_fraction(rows.checksum(index), fraction) for index in range(len(rows))])
    if held.all():
        raise UsageError(
            f"demos.holdout = {fraction} leaves no row of {PATH} to train on: lower it, or give more rows."
        )
    return np.flatnonzero(~held), np.flatnonzero(held)


def open_rows_of(labels: str, path: Path, fraction: float, reads_images: bool = True) -> tuple[Samples, Samples | None]:
    """The samples of a file to train on, and those that are held out; None if there are none."""
    made = {"pairs": _pairs, "steps": _steps}[labels]
    train, held = made(path, fraction, reads_images)
    return train, held if len(held) else None


def _pairs(path: Path, fraction: float, reads_images: bool) -> tuple[Samples, Samples]:
    rows = PreferenceRows(path, reads_images)
    kept, held = split_rows(rows, fraction)
    return Pairs(rows, kept), Pairs(rows, held)


def _steps(path: Path, fraction: float, reads_images: bool) -> tuple[Samples, Samples]:
    rows = StepRows(path, reads_images)
    kept, held = split_rows(rows, fraction)
    train, rest = Steps(rows, kept), Steps(rows, held)
    refuse_one_kind(
        train.labels > 0.5, f"{PATH}: its {counted(len(train), 'step')} to train on", "give rows with others."
    )
    if len(held):
        remedy = "raise demos.holdout, or give more rows."
        refuse_one_kind(rest.labels > 0.5, f"{PATH}: its {counted(len(rest), 'held-out step')}", remedy)
    return train, rest


def rows_of(samples: Samples, indices: Sequence[int] | IntArray, model: RewardModel) -> Judged:
    """Several samples as one batch."""
    parts = [samples.row(int(index), model) for index in indices]
    return type(parts[0]).cat(parts)
