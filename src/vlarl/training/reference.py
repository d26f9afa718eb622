"""The reference: the policy that training started from, which a KL penalty keeps the trained one near.

Fresh adapters are switched off for it, and nothing is copied. Where the model itself is trained, or adapters that were
trained before, a frozen copy of what is trained takes its place in the policy for the pass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.distributed.tensor import DTensor

from vlarl.config.schema import Config
from vlarl.policies.adapters import is_adapter
from vlarl.policies.base import Policy
from vlarl.policies.load import checkpoint_folder, load_configured
from vlarl.training.fsdp import part_like
from vlarl.training.swap import swapped, trained_weights


class Reference:
    """Scores as the policy did when training started."""

    def __init__(self, policy: Policy, weights: dict[str, torch.Tensor] | None) -> None:
        """`weights` are what the trained ones were at the start; None: the policy without its adapters."""
        self.policy = policy
        self.weights = weights

    def in_place(self) -> AbstractContextManager[None]:
        """Inside the block the policy is the reference."""
        return self.policy.without_adapters() if self.weights is None else swapped(self.policy, self.weights)


def reference_here(policy: Policy, config: Config) -> Reference:
    """A reference to the policy as it is now, before anything was trained."""
    if policy.has_adapter and not starts_from_adapter(config):
        return Reference(policy, None)
    return Reference(policy, {name: p.detach().clone() for name, p in trained_weights(policy).items()})


def reference_at_start(policy: Policy, config: Config, device: torch.device) -> Reference:
    """The same for a resumed run: what it started from is read again, since the policy has been trained since."""
    if policy.has_adapter and not starts_from_adapter(config):
        return Reference(policy, None)
    settings, trained = config.policy, trained_weights(policy)
    sharded = any(isinstance(p, DTensor) for p in trained.values())
    start = load_configured(settings, settings.path, device, settings.decoder, settings.actions, deferred=sharded)
    start.prepare_training(settings, config.lora, config.run.seed)
    return Reference(policy, {name: part_like(p, trained[name]).detach() for name, p in trained_weights(start).items()})


def starts_from_adapter(config: Config) -> bool:
    """Whether training continues with adapters that were trained before."""
    return config.lora.adapter is not None or is_adapter(checkpoint_folder(config.policy.path))
