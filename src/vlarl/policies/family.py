"""The contract of a family of policies: what is known of a checkpoint before there is a policy.

load.py lists the families and finds the one that a checkpoint belongs to. A family imports its model only when one of
these methods is called: the list itself loads nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch

    from vlarl.policies.base import Policy

DtypeName = Literal["float32", "bfloat16"]

BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2}
FLOAT32 = BYTES["float32"]


def copied_bytes(dtype: DtypeName, quantize: Literal[4, 8] | None) -> int:
    """Bytes of the lower-precision copy of a float32 adapter; quantised layers have none."""
    return BYTES[dtype] if BYTES[dtype] < FLOAT32 and quantize is None else 0


@dataclass(frozen=True)
class FlowOptions:
    """How a flow policy is used: the options `policy.flow_*`, and how its values are mapped to the robot's."""

    noise: Literal["sde", "cps", "noise"] = "sde"
    level: float = 0.5
    std: tuple[float, float] = (0.08, 0.16)
    steps: int | None = None
    stochastic_step: int | None = None
    critic: Literal["vlm", "expert"] = "vlm"
    gripper: Literal["same", "signed"] | None = None  # None: the checkpoint's
    state_dims: tuple[int, ...] | None = None

    def refuse_given(self) -> None:
        """ValueError for values that were given to a policy of another kind."""
        defaults = FlowOptions()
        names = {f"policy.{name if name in MAPPED else f'flow_{name}'}": name for name in asdict(self)}
        given = [option for option, name in names.items() if getattr(self, name) != getattr(defaults, name)]
        if given:
            raise ValueError(f"{', '.join(given)} is for flow policies such as SmolVLA, and this is none: leave it out")


MAPPED = ("gripper", "state_dims")  # fields whose options have no prefix


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is read: the options of the section `policy`; None is the checkpoint's own value."""

    dtype: torch.dtype
    device: torch.device | str  # `meta`: without weights, for processing observations only
    decoder: Literal["autoregressive", "parallel"] | None = None
    chunk_length: int | None = None
    num_images: int | None = None
    use_proprio: bool | None = None
    actions: Literal["tokens", "hybrid", "l1"] = "tokens"
    resize: Literal["bicubic", "lanczos3"] = "bicubic"
    center_crop: bool = False
    heads_device: torch.device | str | None = None
    quantize: Literal[4, 8] | None = None
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    base: str | None = None  # the base model of an adapter, if it is not the one that the adapter names
    deferred: bool = False  # weights may stay on disk (policies/deferred.py), for learners that read their parts
    flow: FlowOptions = FlowOptions()


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak, by purpose."""

    weights: int
    adapters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0

    @classmethod
    def of_lora(cls, weights: int, adapters: int, copied: int, activations: int) -> MemoryEstimate:
        """So many weights of adapters: float32 with gradients and optimizer state, and `copied` bytes more for each."""
        own = 4 * adapters
        return cls(weights, own + adapters * copied, gradients=own, optimizer=2 * own, activations=activations)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name."""
        return asdict(self)

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def lasting(self) -> int:
        """Bytes that stay allocated after an update: adapters, their gradients and the optimizer's state."""
        return self.adapters + self.gradients + self.optimizer


@dataclass(frozen=True)
class AdapterFacts:
    """A LoRA adapter and its base model."""

    rank: int
    alpha: int
    base: str


@dataclass(frozen=True)
class StoredWeights:
    """The weights on disk."""

    num_parameters: int
    dtype: str  # of most of them
    num_bytes: int
    num_files: int


@dataclass(frozen=True)
class Description(ABC):
    """What is known about a checkpoint without loading it, for `vlarl doctor`."""

    path: str
    kind: str
    adapter: AdapterFacts | None
    stored: StoredWeights
    problems: tuple[str, ...]  # why it would not load

    @property
    def train_options(self) -> dict[str, str]:
        """Options that `vlarl train` needs besides policy.path to train it."""
        return {}

    @property
    @abstractmethod
    def prompt_length(self) -> int:
        """Tokens of a prompt that the estimates assume."""

    @abstractmethod
    def model_facts(self, num_images: int | None) -> dict[str, str]:
        """Title -> a line about the model; `num_images` is the option that was given."""

    @abstractmethod
    def file_facts(self) -> dict[str, list[str]]:
        """Title -> lines about what else is in the folder, and how to add what is missing."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The whole description as JSON."""

    @abstractmethod
    def estimate_rollout(
        self, batch_size: int, dtype: DtypeName, quantize: Literal[4, 8] | None = None
    ) -> MemoryEstimate:
        """Memory for sampling the decisions of a batch of observations."""

    @abstractmethod
    def estimate_lora_update(
        self,
        microbatch_size: int,
        dtype: DtypeName,
        rank: int,
        gradient_checkpointing: bool,
        quantize: Literal[4, 8] | None = None,
    ) -> MemoryEstimate:
        """Memory for one pass of an update of adapters on all linear layers."""


class Family(ABC):
    """One kind of checkpoint."""

    supported: ClassVar[str]  # its checkpoints in words, for the error about a model of another type
    writes_texts: ClassVar[bool] = False  # and responds to prompts; otherwise its decisions are actions of a robot

    @abstractmethod
    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json whose model type is unknown or absent is one of this family all the same."""

    @abstractmethod
    def read(self, path: str, folder: Path, options: LoadOptions) -> Policy:
        """Load the checkpoint or adapter that `path` names and `folder` holds; OSError or ValueError if it can't be."""

    @abstractmethod
    def describe(
        self,
        path: str,
        folder: Path,
        decoder: Literal["autoregressive", "parallel"] | None = None,
        num_images: int | None = None,
    ) -> Description:
        """Describe the checkpoint as `read` would read it, without its weights."""

    def training_warning(self, path: str, folder: Path) -> str | None:
        """What a user should know before RL starts from this checkpoint; None: nothing."""
        return None

    def has_regression_head(self, folder: Path) -> bool:
        """Whether the checkpoint has a head that regresses actions, which supervised training can continue."""
        return False
