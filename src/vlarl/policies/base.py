"""The policy contract: what engines and learners ask of a vision-language-action model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import nn

from vlarl.config.training_data import TrainingData
from vlarl.types import FloatArray, IntArray, Observation, PolicyInput


@dataclass(frozen=True)
class Scores:
    """What the policy says of given action tokens."""

    logits: torch.Tensor  # [B, K*D, num_bins] float32 over the action ids, before temperature
    values: torch.Tensor | None  # [B, V] float32, read at the state before the first action token; None without critic
    aux_loss: torch.Tensor | None = None  # scalar, what the model wants minimised besides, such as load balance


Chooser = Callable[[torch.Tensor, int], torch.Tensor]
"""Picks tokens: (logits [B, T, num_bins], index of the first of these T tokens) -> places [B, T] in the support."""


class ActionCodec(Protocol):
    """Action tokens <-> continuous actions in [-1, 1]."""

    first_id: int  # lowest action id; the support is first_id .. first_id + num_bins - 1
    num_bins: int

    def decode(self, token_ids: IntArray) -> FloatArray:
        """[..., K*D] vocabulary ids -> [..., K, D] normalised actions."""
        ...

    def encode(self, actions: FloatArray) -> IntArray:
        """[..., K, D] normalised actions -> [..., K*D] vocabulary ids."""
        ...


class Policy(nn.Module, ABC):
    """A module that scores and decodes action tokens. Parameters under `value_head.` are the critic's."""

    codec: ActionCodec
    chunk_length: int
    action_dim: int
    has_adapter: bool = False  # trained in place of the model's own weights
    training_data: TrainingData = TrainingData()  # what it was trained on; `save` writes it beside the weights

    @property
    @abstractmethod
    def image_size(self) -> int:
        """Pixels of an image side, as the policy reads it."""

    @property
    @abstractmethod
    def num_images(self) -> int:
        """Views of an observation that the policy reads."""

    @abstractmethod
    def process(self, observations: Sequence[Observation]) -> PolicyInput:
        """Prompts and pixels, on the CPU; the same function for engine and learner."""

    @abstractmethod
    def score(self, inputs: PolicyInput, token_ids: torch.Tensor, *, critic_only: bool = False) -> Scores:
        """Logits over the action support for each of the given tokens [B, K*D], and values with a critic.

        `critic_only`: gradients reach the value head and nothing before it.
        """

    @abstractmethod
    def values(self, inputs: PolicyInput) -> torch.Tensor:
        """[B, V] the critic's values alone, for observations that no action follows."""

    @abstractmethod
    def decode(self, inputs: PolicyInput, choose: Chooser) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens picked by `choose`: vocabulary ids [B, K*D] and the logits [B, K*D, num_bins] they came from."""

    @abstractmethod
    def unnormalize(self, actions: np.ndarray, unnorm_key: str | None = None) -> FloatArray:
        """Normalised actions [..., D] -> the robot's units, by the checkpoint's statistics."""

    @abstractmethod
    def use_statistics(self, unnorm_key: str | None, suite: str) -> None:
        """Fix the statistics to normalise by: the key given, else the suite's own, else the only one there is."""

    @property
    def recordable(self) -> bool:
        """Whether `decode` may be recorded as a CUDA graph: no shape and no branch of it depends on the input."""
        return True

    def weights_changed(self) -> None:
        """Told after weights were changed in place: whatever is kept beside them is brought up to date."""

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside the block the policy acts and scores as if it had no adapters."""
        return nullcontext()

    def reset_adapters(self, seed: int) -> None:
        """Start the adapters again, where there are some: they change nothing yet."""

    @abstractmethod
    def freeze(self, part: Literal["vision", "backbone"]) -> None:
        """Leave the vision part, or all but the heads, out of training."""

    @abstractmethod
    def attach_value_head(self, hidden_sizes: Sequence[int], seed: int, num_values: int | None = None) -> nn.Module:
        """Add a fresh critic that reads the state before the first action token and gives `num_values` (1) a decision,
        unless the checkpoint brought one that gives as many."""

    @abstractmethod
    def detach_value_head(self) -> None:
        """Take the critic away, where there is one."""

    @abstractmethod
    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the checkpoint in the original layout, or the adapters alone where it has some; `dtype` rounds weights,
        which otherwise stay as they are."""
