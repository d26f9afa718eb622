"""The policy contract: what engines and learners need of a model, whatever kind of decision it samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import nn

from vlarl.config.training_data import TrainingData
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.types import Action, Observation

Level = Literal["chunk", "step", "token"]
"""What has a value of its own: a decision, each of its environment steps, each of its elements."""


@dataclass(frozen=True)
class Evaluation:
    """What the policy says of given decisions, with gradients where they are enabled."""

    logprobs: torch.Tensor  # [B, L] float32 at the temperature; anything where the decisions are masked
    entropy: torch.Tensor  # [B, L] float32 at the temperature; anything where the decisions are masked
    values: torch.Tensor | None = None  # [B, V] float32, read before the decision is sampled; None without a critic
    aux_loss: torch.Tensor | None = None  # scalar, what the model wants minimised besides, such as load balance
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # name -> [B, L] what else was asked for


class Policy(nn.Module, ABC):
    """A module that samples decisions and evaluates them. Parameters under `value_head.` are the critic's."""

    sampling_options: ClassVar[frozenset[str]] = frozenset({"temperature"})  # fields of `Sampling` that it takes
    extras: ClassVar[frozenset[str]] = frozenset()  # names that `evaluate` can be asked for
    num_steps: int  # environment steps of a decision: the actions of a chunk
    action_dim: int  # dimensions of an action
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
    def process(self, observations: Sequence[Observation]) -> TensorRows:
        """Prompts and pixels as the model reads them, on the CPU."""

    @abstractmethod
    def noise(self, seeds: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """[B, …] everything random about a decision, each row from its own seed."""

    @abstractmethod
    def sample(self, inputs: TensorRows, noise: torch.Tensor, sampling: Sampling) -> Decisions:
        """One decision for each row, which depends on its own inputs and noise alone; without gradients."""

    @abstractmethod
    def evaluate(
        self,
        inputs: TensorRows,
        decisions: Decisions,
        temperature: float,
        *,
        critic_only: bool = False,
        entropy_gradient: bool = False,
        extras: Collection[str] = (),
    ) -> Evaluation:
        """Log-probs and entropies of given decisions, and values with a critic.

        Masked elements send no gradient, not even where they overflow. `critic_only`: gradients reach the value head
        and nothing before it. `entropy_gradient`: they reach the entropy, too, which takes memory.
        """

    @abstractmethod
    def values(self, inputs: TensorRows, decisions: Decisions | None = None) -> torch.Tensor:
        """[B, V] the critic's values alone; where each element has one, as many as the decisions have elements.

        Without decisions, of which there are none at a last observation, the first value counts.
        """

    @abstractmethod
    def act(self, decisions: Decisions) -> list[Action]:
        """What the environment is given for each decision: an array [K, D] in the robot's units, or a text."""

    @abstractmethod
    def use_statistics(self, unnorm_key: str | None, suite: str) -> None:
        """Fix the statistics to normalise by: the key given, else the suite's own, else the only one there is."""

    @property
    def recordable(self) -> bool:
        """Whether `sample` may be recorded as a CUDA graph: no shape and no branch of it depends on the input."""
        return True

    def weights_changed(self) -> None:
        """Called after weights were changed in place: whatever is kept beside them is brought up to date."""
        return None

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside the block the policy samples and evaluates as if it had no adapters."""
        return nullcontext()

    def reset_adapters(self, seed: int) -> None:
        """Start the adapters again, where there are some: they change nothing yet."""
        return None

    @abstractmethod
    def freeze(self, part: Literal["vision", "backbone"]) -> None:
        """Leave the vision part, or all but the heads, out of training."""

    @abstractmethod
    def attach_value_head(self, hidden_sizes: Sequence[int], seed: int, level: Level = "chunk") -> nn.Module:
        """Add a new critic that reads the state before the decision and gives values at this level, unless the
        checkpoint has one that gives as many."""

    @abstractmethod
    def detach_value_head(self) -> None:
        """Remove the critic, where there is one."""

    @abstractmethod
    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the checkpoint in the original layout, or the adapters alone where it has some; `dtype` rounds weights,
        which otherwise stay as they are."""
