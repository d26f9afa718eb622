"""What reward models are trained on, as batches with a loss, and how well scores agree with labels.

PairRows     of two responses to a prompt the chosen one scores higher (Bradley and Terry): -log σ(chosen - rejected)
LabelRows    a state or a step is good with the labelled probability: cross-entropy of σ(score)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from vlarl.decisions import TensorRows
from vlarl.types import BoolArray

Score = Callable[[TensorRows], torch.Tensor]  # rows -> scores [B]


@dataclass(frozen=True)
class Judged(TensorRows):
    """A batch with a loss for the scores of a reward model."""

    @abstractmethod
    def values(self, score: Score) -> torch.Tensor:
        """[B] what is compared with the labels: the score, or the difference of two."""

    @abstractmethod
    def losses(self, values: torch.Tensor) -> torch.Tensor:
        """[B] the loss of each member with these values."""


@dataclass(frozen=True)
class PairRows(Judged):
    """Prompts with a chosen and a rejected response."""

    chosen: TensorRows
    rejected: TensorRows

    def values(self, score: Score) -> torch.Tensor:
        """[B] by how much the chosen response scores higher."""
        both = score(type(self.chosen).cat([self.chosen, self.rejected]))
        return both[: len(self)] - both[len(self) :]

    def losses(self, values: torch.Tensor) -> torch.Tensor:
        """[B] how unlikely the choice is under the scores."""
        return pair_losses(values)


@dataclass(frozen=True)
class LabelRows(Judged):
    """Prompts with responses, or states, and how good they are."""

    inputs: TensorRows
    labels: torch.Tensor  # [B] float32 from 0 to 1

    def values(self, score: Score) -> torch.Tensor:
        """[B] the scores, of which σ is a probability."""
        return score(self.inputs)

    def losses(self, values: torch.Tensor) -> torch.Tensor:
        """[B] the cross-entropy of the labels."""
        return label_losses(values, self.labels)


def pair_losses(margins: torch.Tensor) -> torch.Tensor:
    """Bradley and Terry's loss of score differences.

    >>> pair_losses(torch.tensor([0.0])).exp()  # no difference: the choice has a probability of 1/2
    tensor([2.])
    """
    return -F.logsigmoid(margins)


def label_losses(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of labels from 0 to 1."""
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")


def auc(scores: NDArray[np.floating], is_good: BoolArray) -> float:
    """How often a good member scores higher than a bad one, over all such pairs; equal scores count as half.

    >>> auc(np.array([0.9, 0.4, 0.5, 0.4]), np.array([True, True, False, False]))
    0.625
    """
    good, bad = np.asarray(scores)[is_good], np.sort(np.asarray(scores)[~is_good])
    if not len(good) or not len(bad):
        raise ValueError(f"{len(good)} good and {len(bad)} bad members can't be ranked: both kinds are needed")
    below, up_to = np.searchsorted(bad, good, side="left"), np.searchsorted(bad, good, side="right")
    return float((below + up_to).sum() / (2 * len(good) * len(bad)))
