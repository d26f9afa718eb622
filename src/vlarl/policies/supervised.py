"""The contract of policies that can be trained on demonstrations.

    instructions, states, actions ─► demo_rows ─► with_noise ───┐
                                                                ├─► supervised_loss
    images ─────────────────────────► demo_frames ──────────────┘

Rows are small and made once for all demonstrations. Frames are large: the caller keeps them, or reads some for a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from vlarl.config.finetune import FinetunePolicyConfig
from vlarl.config.schema import LoraConfig
from vlarl.decisions import TensorRows
from vlarl.policies.base import Policy
from vlarl.types import FloatArray, UInt8Array


@dataclass(frozen=True)
class ImitationErrors:
    """How far what the policy would do is from what was demonstrated, for each decision of a batch."""

    l1: torch.Tensor  # [B] mean absolute difference of the normalised actions
    token_accuracy: torch.Tensor | None  # [B] fraction of the action tokens that are right; None for other policies


class Saved(Protocol):
    """What is written as a checkpoint."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules, as of any module of torch."""
        ...

    @property
    def has_adapter(self) -> bool:
        """Whether low-rank adapters are trained in place of the weights."""
        ...

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the checkpoint; `dtype` converts its weights."""
        ...


class Supervised(Saved, Protocol):
    """What a supervised run trains: a policy, or a reward model (rewards/reward_model.py)."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights, as of any module of torch."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their names."""
        ...

    def train(self) -> object:
        """Switch to training."""
        ...

    def supervised_loss(self, rows: TensorRows, frames: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch, with gradients."""
        ...

    def weights_changed(self) -> None:
        """Called after weights were changed in place."""
        ...


class SupervisedPolicy(Policy):
    """A policy with a loss on demonstrated actions: cross-entropy of tokens, absolute error, flow matching."""

    keeps_frame_size: ClassVar[bool] = False
    """Frames of demonstrations stay as large as they were recorded, so that all must have one size."""

    @property
    @abstractmethod
    def proprio_dim(self) -> int | None:
        """Dimensions of the robot's state that the policy reads; None where it reads none."""

    @abstractmethod
    def prepare_supervised(self, settings: FinetunePolicyConfig, lora: LoraConfig, seed: int) -> None:
        """Set up what is trained, as configured: heads, freezing, adapters, gradient checkpointing."""

    @abstractmethod
    def add_statistics(self, name: str, statistics: Mapping[str, Any]) -> None:
        """Add statistics to normalise by, which checkpoints are saved with, unless there are some of this name.

        They have the layout of dataset_statistics.json (docs/checkpoints.md).
        """

    def add_all_statistics(
        self, statistics: Mapping[str, Mapping[str, Any]], pooled: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Add those of all datasets of a run, by name; `pooled` computes what a policy takes that normalises all of
        them alike."""
        for name, values in statistics.items():
            self.add_statistics(name, values)

    @abstractmethod
    def demo_rows(self, instructions: Sequence[str], proprio: FloatArray, actions: FloatArray) -> TensorRows:
        """What the loss reads of each demonstrated decision besides its images, on the CPU.

        States [N, R] and actions [N, K, D] are in the robot's units; `use_statistics` says how they are normalised.
        """

    def with_noise(self, rows: TensorRows, seed: int, samples: Sequence[int]) -> TensorRows:
        """The rows with the random values that their loss reads; those of a sample follow from the seed and its index
        alone, so that it has the same loss in any batch. Unchanged for losses that sample nothing."""
        return rows

    @abstractmethod
    def demo_frames(self, images: Sequence[UInt8Array] | UInt8Array) -> torch.Tensor:
        """[N, …] uint8: images [I, H, W, 3] as the policy reads them, or the given array where they are so already."""

    @abstractmethod
    def supervised_loss(self, rows: TensorRows, frames: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch, with gradients. What else is random in it, such as dropout, comes from torch's
        default generator."""

    @abstractmethod
    def imitation_errors(self, rows: TensorRows, frames: torch.Tensor) -> ImitationErrors:
        """The errors of its most likely actions. Each token is chosen after the demonstrated ones before it."""
