"""No dropout in RL: it compares log-probs of the same tokens before and after a step, which need the same network."""

from __future__ import annotations

import logging

from torch import nn

log = logging.getLogger(__name__)


def remove_dropout(network: nn.Module) -> None:
    """Remove all dropout from a network, such as that of an adapter that was trained with it."""
    found = [
        (parent, name, child.p)
        for parent in network.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Dropout) and child.p > 0
    ]
    for parent, name, _ in found:
        setattr(parent, name, nn.Identity())
    if found:
        rates = ", ".join(f"{rate:g}" for rate in sorted({rate for *_, rate in found}))
        log.warning("the policy was trained with dropout (%s), which RL does not use: it is off in this run", rates)
