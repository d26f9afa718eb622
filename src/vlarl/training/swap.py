"""Other weights in the place of a policy's own for a while: its average's, or those that training started from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from vlarl.policies.base import Policy

CRITIC = "value_head."  # prefix of the critic's parameters


def trained_weights(policy: Policy) -> dict[str, nn.Parameter]:
    """What training changes of a policy, by name; the critic is no part of it."""
    return {n: p for n, p in policy.named_parameters() if p.requires_grad and not n.startswith(CRITIC)}


@contextmanager
def swapped(policy: Policy, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside the block the policy has these weights, and `weights` holds the policy's; afterwards all is as before."""
    _exchange(policy, weights)
    try:
        yield
    finally:
        _exchange(policy, weights)


@torch.no_grad()
def _exchange(policy: Policy, weights: Mapping[str, torch.Tensor]) -> None:
    """Values change places, memory does not: engines may have noted where the weights are."""
    parameters = dict(policy.named_parameters())
    for name, tensor in weights.items():
        own = parameters[name].detach().clone()
        parameters[name].copy_(tensor)
        tensor.copy_(own)
    policy.weights_changed()
