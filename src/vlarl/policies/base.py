"""The policy contract: what engines and learners need of a model, whatever kind of decision it samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.config.training_data import TrainingData
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.errors import UsageError
from vlarl.policies import adapters
from vlarl.policies.bench_model import BenchModel
from vlarl.policies.weight_files import MAX_SHARD_BYTES
from vlarl.types import Action, Observation, Prompt

Level = Literal["chunk", "step", "token"]
"""What has a value of its own: a decision, each of its environment steps, each of its elements."""


@dataclass(frozen=True)
class BaseCheckpoint:
    """Where a model's own weights were read from; adapters refer to it."""

    path: str  # as a user names it: a built-in model, a folder, a hub id
    folder: Path
    fingerprint: str  # of the weights, as they were when they were read


@dataclass(frozen=True)
class TokenCount:
    """How many tokens a pass read, and how many it computed, padding included."""

    read: int
    computed: int


@dataclass(frozen=True)
class Evaluation:
    """What the policy says of given decisions, with gradients where they are enabled."""

    logprobs: torch.Tensor  # [B, L] float32 at the temperature; anything where the decisions are masked
    entropy: torch.Tensor  # [B, L] float32 at the temperature; anything where the decisions are masked
    values: torch.Tensor | None = None  # [B, V] float32, read before the decision is sampled; None without a critic
    aux_loss: torch.Tensor | None = None  # scalar, what the model wants minimised besides, such as load balance
    tokens: TokenCount | None = None  # of the pass; None where all rows have as many
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # name -> [B, L] what else was requested


class VllmModel(Protocol):
    """What vLLM has to be told to run a policy's model, and how observations get in and decisions out."""

    folder: Path  # of the checkpoint that vLLM loads; adapters are sent to it
    max_positions: int  # tokens of the longest sequence that the model reads
    head_size: int  # of an attention head
    values_per_token: int  # that the cache holds for each token: keys and values of all layers
    whole_vocabulary: bool  # log-probs are over all ids, also over those that sampling leaves out

    def register(self) -> None:
        """Make the model's class known to vLLM in this process, where it is not one of vLLM's own."""
        ...

    def arguments(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM` that the model needs."""
        ...

    def prompt(self, inputs: TensorRows, row: int, sampling: Sampling, longest: int) -> Any:
        """One row as vLLM reads it; UsageError if it and its decision may be longer than the engine supports."""
        ...

    def sampling_arguments(self, sampling: Sampling) -> dict[str, Any]:
        """Arguments of `vllm.SamplingParams`, besides temperature and seed."""
        ...

    def ends(self, ids: Sequence[int], sampling: Sampling) -> bool:
        """Whether a decision ends with these tokens for a reason that vLLM does not know."""
        ...

    def decisions(
        self, ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], sampling: Sampling
    ) -> Decisions:
        """The decisions that were generated as these tokens, with the log-prob of each."""
        ...


class Policy(nn.Module, ABC):
    """A module that samples decisions and evaluates them. Parameters under `value_head.` are the critic's."""

    sampling_options: ClassVar[frozenset[str]] = frozenset({"temperature"})  # fields of `Sampling` that it takes
    extras: ClassVar[frozenset[str]] = frozenset()  # further columns that `evaluate` can return
    has_compute_dtype: ClassVar[bool] = True  # sharded, it may compute in another type than it has its weights in
    differs_in_length: ClassVar[bool] = False  # its decisions are texts: what a row costs depends on its tokens
    num_steps: int  # environment steps of a decision: the actions of a chunk
    action_dim: int  # dimensions of an action
    model: nn.Module  # what the checkpoint's weight files hold, and what adapters are added to
    base: BaseCheckpoint | None = None  # None: not loaded from a checkpoint
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

    def check_sampling(self, sampling: Sampling, prompt_tokens: int = 0) -> None:
        """UsageError for values of its sampling options that the model can't be sampled with, after prompts of so many
        tokens."""
        return None

    def prompt_length(self, prompt: Prompt) -> int:
        """Tokens of a prompt, those of its images included; the pixels don't matter, only the sizes of images."""
        raise UsageError(f"{type(self).__name__} reads no prompts.")

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

    def use_packing(self) -> None:
        """From here on `evaluate` and `values` lay rows end to end instead of padding them; UsageError where they would
        give other results."""
        raise UsageError(
            f"optim.packing: the decisions of {type(self).__name__} all have the same length, so there is no padding "
            "to save; set it to false."
        )

    @abstractmethod
    def values(self, inputs: TensorRows, decisions: Decisions | None = None) -> torch.Tensor:
        """[B, V] the critic's values alone; where each element has one, as many as the decisions have elements.

        Without decisions, of which there are none at a last observation, the first value counts.
        """

    def text_values(self, inputs: TensorRows, decisions: Decisions) -> torch.Tensor:
        """[B] the value head's value of each prompt with its whole text, for reward models."""
        raise UsageError(f"{type(self).__name__} reads no texts.")

    @abstractmethod
    def act(self, decisions: Decisions) -> list[Action]:
        """What the environment is given for each decision: an array [K, D] in the robot's units, or a text."""

    def decisions_of(self, actions: Sequence[Action]) -> Decisions:
        """The decisions that `act` turns into these actions, as far as the policy can express them: what it is trained
        on to imitate. Their log-probs are 0."""
        raise UsageError(f"{type(self).__name__} can't imitate given actions.")

    @abstractmethod
    def use_statistics(self, unnorm_key: str | None, *suites: str) -> None:
        """Fix the statistics to normalise by: the key given, else the suites' own, else the only one there is.

        UsageError where the suites have different ones: a policy normalises all its tasks alike.
        """

    @abstractmethod
    def prepare_training(self, settings: ModelConfig, lora: LoraConfig, seed: int) -> None:
        """Set up freezing, adapters and gradient checkpointing as configured; loaded adapters are trained further."""

    @property
    def recordable(self) -> bool:
        """Whether `sample` may be recorded as a CUDA graph: no shape and no branch of it depends on the input."""
        return True

    @property
    def records_updates(self) -> bool:
        """Whether `evaluate` with its backward pass may be recorded as a CUDA graph: nothing in them waits for the
        device or is random, and no shape depends on the values of the inputs."""
        return False

    def record_passes(self) -> None:
        """Called once on a GPU where `sample` as a whole can't be recorded, but CUDA graphs are wanted."""

    @property
    def has_aux_loss(self) -> bool:
        """Whether `evaluate` reports an auxiliary loss of the model's own."""
        return False

    def weights_changed(self) -> None:
        """Called after weights were changed in place: whatever is kept beside them is brought up to date."""
        if self.has_adapter:
            from vlarl.policies import lora  # it loads peft

            lora.refresh_operands(self.model)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside the block the policy samples and evaluates as if it had no adapters."""
        return adapters.without_adapters(self.model) if self.has_adapter else nullcontext()

    def reset_adapters(self, seed: int) -> None:
        """Start the adapters again, where there are some: they change nothing yet."""
        if self.has_adapter:
            adapters.reset(self.model, seed)

    def fold_adapter(self) -> None:
        """Merge the adapters, where there are some, into the model's own weights; the policy then has none."""
        if self.has_adapter:
            adapters.fold(self.model)
            self.has_adapter = False

    def probe_logits(self) -> torch.Tensor:
        """[B, L, …] the model's logits for synthetic decisions, the same for all models of a size, on the host: a merge
        compares them before and after."""
        raise UsageError("adapters of this kind of policy can't be merged: use the adapter as it is.")

    def adapt(self, settings: ModelConfig, lora: LoraConfig, seed: int) -> None:
        """Freeze parts and add adapters as `prepare_training` does, for an engine that is sent trained weights."""
        return None

    @property
    def fsdp_units(self) -> tuple[type[nn.Module], ...]:
        """Modules whose weights are gathered together for a pass; what is in none of them is gathered with the root."""
        return ()

    @property
    def float32_units(self) -> tuple[type[nn.Module], ...]:
        """Those of the units that compute in their own type, whatever the policy's."""
        return ()

    def engine_weights(self) -> dict[str, nn.Parameter]:
        """The weights that engines have, by the checkpoint's names, adapters among them; critics stay with learners."""
        return {
            name.removeprefix("model.").replace(".base_layer.", ".").replace(".default.weight", ".weight"): parameter
            for name, parameter in self.named_parameters()
            if not name.startswith("value_head.")
        }

    def unused_weights(self) -> frozenset[str]:
        """Those of the `engine_weights` that no pass reads, whatever their values."""
        return frozenset()

    def adapter_sizes(self) -> dict[str, tuple[int, float]]:
        """(rank, scale) of each adapter, by the layer's name as in `engine_weights`."""
        found = adapters.lora_layers(self.model) if self.has_adapter else {}
        return {name: (layer.r["default"], layer.scaling["default"]) for name, layer in found.items()}

    def vllm_model(self, model_class: Literal["vlarl", "vllm"]) -> VllmModel:
        """How vLLM runs the model; UsageError if it can't."""
        raise UsageError(f"{type(self).__name__} does not run in vLLM: use the torch engine (vllm.num_engines 0).")

    def bench_model(self) -> BenchModel:
        """The policy as `vlarl bench` measures it; UsageError for a policy that it does not know how to measure."""
        raise UsageError(
            f"vlarl bench does not measure {type(self).__name__}: name a checkpoint of OpenVLA or OpenVLA-OFT."
        )

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
    def save(self, folder: Path, dtype: torch.dtype | None = None, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write the checkpoint in the original layout, or the adapters alone where it has some; `dtype` rounds weights,
        which otherwise stay as they are."""

    def save_merged(self, folder: Path, adapter: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
        """Write the model that the folder `adapter` was folded into, for other programs: without what only training
        reads."""
        self.save(folder, dtype, max_shard_bytes=max_shard_bytes)
