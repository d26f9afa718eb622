"""Other weights in the place of a policy's own for a while: its average's, or those that training started from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    exchanged: list[str] = []
    try:
        _exchange(policy, weights, weights, exchanged)
        yield
    finally:
        _exchange(policy, weights, exchanged, [])  # where memory ran out on the way in, those that had changed places


@torch.no_grad()
def _exchange(policy: Policy, weights: Mapping[str, torch.Tensor], names: Iterable[str], exchanged: list[str]) -> None:
    """Values change places, memory does not: engines may have noted where the weights are. `exchanged` gets the names
    of those that have, one by one."""
    parameters = dict(policy.named_parameters())
    for name in names:
        own = parameters[name].detach().clone()
        parameters[name].copy_(weights[name])
        weights[name].copy_(own)
        exchanged.append(name)
    policy.weights_changed()
