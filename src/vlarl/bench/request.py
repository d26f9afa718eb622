"""What is to be measured: the options of the commands, and the policy that they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from vlarl.bench.results import Row
from vlarl.bench.timing import GIB, Rates, measure_rates, release
from vlarl.config.schema import Config, LoraConfig, ModelConfig
from vlarl.devices import choose_device
from vlarl.errors import UsageError
from vlarl.policies.base import Policy
from vlarl.policies.load import DTYPES, load_policy

SEED = 0


@dataclass(frozen=True)
class BenchRequest:
    """The options that all commands have; None is the default that docs/performance.md names."""

    model: str
    decoder: Literal["auto", "autoregressive", "parallel"] = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None  # None: bfloat16 on a GPU, float32 on a CPU
    device: str = "auto"
    adapters: bool | None = None  # None: both ways, or the way that training usually takes
    rank: int = 32
    repeats: int = 5
    peers: bool = True
    memory_gb: float | None = None  # of the GPU that may be used


class Bench:
    """A machine and its rates, and how a policy is loaded on it."""

    def __init__(self, request: BenchRequest, *, measured: bool = True) -> None:
        """Without `measured` the rates are left out, for processes that time nothing."""
        self.request = request
        self.device = choose_device(request.device)
        self._limit_memory()
        self.dtype: Literal["float32", "bfloat16"] = request.dtype or (
            "bfloat16" if self.device.type == "cuda" else "float32"
        )
        nan = float("nan")
        self.rates = measure_rates(self.device, DTYPES[self.dtype]) if measured else Rates(nan, nan)
        release(self.device)

    def load(self) -> Policy:
        """The policy without adapters."""
        request = self.request
        policy = load_policy(request.model, decoder=request.decoder, dtype=self.dtype, device=self.device)
        if policy.has_adapter or getattr(policy, "adapter_folder", None) is not None:
            raise UsageError(f"--model {request.model}: this is an adapter; name its base, and --rank for its size.")
        return policy

    def adapt(self, policy: Policy, *, adapters: bool = True) -> Policy:
        """Prepare a loaded policy for training as a run does: layers recomputed, adapters on all linear layers."""
        lora = LoraConfig(enabled=adapters, rank=self.request.rank)
        policy.prepare_training(ModelConfig(dtype=self.dtype, gradient_checkpointing=True), lora, SEED)
        return policy.eval()

    def learner_config(self, microbatch_size: int) -> Config:
        """GRPO with one epoch of one minibatch, started from the engine's log-probs."""
        algorithm = Config().algorithm.model_copy(update={"name": "grpo", "epochs": 1, "old_logprobs": "engine"})
        optim = Config().optim.model_copy(update={"microbatch_size": microbatch_size, "minibatches": 1, "lr": 1e-5})
        return Config().model_copy(update={"algorithm": algorithm, "optim": optim})

    def settings(self, policy: Policy, **others: Any) -> dict[str, Any]:
        """The options as they were used, and the size of the model without adapters."""
        return {
            **asdict(self.request),
            "dtype": self.dtype,
            "device": str(self.device),
            "parameters": sum(p.numel() for p in policy.model.parameters()),
            **others,
        }

    def attempt(self, what: str, count: int, measure: Callable[[], Row]) -> Row:
        """A row, or one that says that the memory did not suffice."""
        try:
            return measure()
        except torch.OutOfMemoryError as error:
            reason = "out of memory: " + str(error).split(". ")[0]
        release(self.device)
        return Row(what, count, error=reason)

    def _limit_memory(self) -> None:
        limit = self.request.memory_gb
        if limit is None:
            return
        if self.device.type != "cuda":
            raise UsageError("--memory-gb limits a GPU's memory, and this device is a CPU: leave it out.")
        if limit == 0:
            raise UsageError("--memory-gb 0 leaves no memory: give more, or leave it out.")
        whole = torch.cuda.get_device_properties(self.device).total_memory
        if limit * GIB > whole:
            raise UsageError(f"--memory-gb {limit:g}: the GPU has {whole / GIB:.1f}; give less, or leave it out.")
        torch.cuda.set_per_process_memory_fraction(limit * GIB / whole, self.device.index)  # no `cuda` without one
