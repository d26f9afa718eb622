"""Temporarily replaces a policy's weights: by their average, or by those that training started from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from vlarl.policies.base import Policy

CRITIC = "value_head."  # prefix of the critic's parameters


def trained_weights(policy: Policy) -> dict[str, nn.Parameter]:
    """The trained weights of a policy, by name, without the critic's."""
    return {n: p for n, p in policy.named_parameters() if p.requires_grad and not n.startswith(CRITIC)}


@contextmanager
def swapped(policy: Policy, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside the block the policy has these weights, and `weights` has the policy's; afterwards they swap back."""
    exchanged: list[str] = []
    try:
        _exchange(policy, weights, weights, exchanged)
        yield
    finally:
        _exchange(policy, weights, exchanged, [])  # only those swapped so far, if memory ran out


@torch.no_grad()
def _exchange(policy: Policy, weights: Mapping[str, torch.Tensor], names: Iterable[str], exchanged: list[str]) -> None:
    """Swap values, not memory: engines may hold pointers to the weights. The names of those swapped are appended to
    `exchanged` one by one."""
    parameters = dict(policy.named_parameters())
    for name in names:
        own = parameters[name].detach().clone()
        parameters[name].copy_(weights[name])
        weights[name].copy_(own)
        exchanged.append(name)
    policy.weights_changed()
