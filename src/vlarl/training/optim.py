"""Optimizers and learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vlarl.config.schema import Schedule


def build_adamw(
    parameters: Iterable[nn.Parameter], lr: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW without weight decay for biases, norms and all other vectors."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)
    optimizer.register_step_post_hook(_count_changes)
    return optimizer


def _count_changes(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Fused kernels change weights without incrementing the version counters that invalidate cached copies."""
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(group["params"])


def lr_factor(updates_done: int, total_updates: int, schedule: Schedule, warmup: int) -> float:
    """The factor of the learning rate in the next update: linear warm-up, then the schedule."""
    if updates_done < warmup:
        return (updates_done + 1) / (warmup + 1)
    progress = min((updates_done - warmup) / max(total_updates - warmup, 1), 1.0)
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


def warmup_cosine(step: int, total_steps: int, warmup_steps: int) -> float:
    """Factor of the learning rate at a step counted from 1: linear warm-up, then half a cosine down to zero."""
    if step <= warmup_steps:
        return step / warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / max(total_steps - warmup_steps, 1)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
