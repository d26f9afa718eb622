"""Supervised training: the optimizer steps of `vlarl finetune`, on batches of demonstrated decisions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from vlarl.config.finetune import FinetuneOptimConfig
from vlarl.decisions import TensorRows
from vlarl.errors import VlarlError
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.training.optim import build_adamw, set_lr, warmup_cosine

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class DemoBatch:
    """Demonstrated decisions, as the policy's loss reads them."""

    rows: TensorRows
    frames: torch.Tensor  # [B, …] uint8


class Batches(Protocol):
    """Demonstrations to train on."""

    def batch(self, first: int, size: int) -> DemoBatch:
        """Samples `first` … `first + size - 1` of the run, on the policy's device."""
        ...


def imitate(
    policy: SupervisedPolicy,
    batches: Batches,
    optim: FinetuneOptimConfig,
    on_log: Callable[[int, dict[str, float]], None],
) -> tuple[float, float]:
    """Train the policy on the demonstrations; returns the first and the last logged loss."""
    optimizer = build_adamw(policy.parameters(), optim.lr, optim.weight_decay, BETAS)
    logged: list[float] = []
    losses: list[float] = []  # of the steps since the last row that were not skipped
    norms: list[float] = []
    policy.train()
    started = time.monotonic()
    for step in range(1, optim.steps + 1):
        set_lr(optimizer, optim.lr * warmup_cosine(step, optim.steps, optim.warmup_steps))
        loss = imitation_loss(policy, batches.batch((step - 1) * optim.batch_size, optim.batch_size), optim)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(policy.parameters(), optim.max_grad_norm)
        value, size = float(loss.detach()), float(norm)
        if np.isfinite([value, size]).all():  # an L1 loss that is not finite still has a finite gradient
            optimizer.step()
            losses.append(value)
            norms.append(size)
        if step % optim.log_interval == 0 or step == optim.steps:
            since = (step - 1) % optim.log_interval + 1
            if not losses:
                raise VlarlError(
                    f"loss or gradient were not finite in any of the {since} steps up to {step}: lower optim.lr (now "
                    f"{optim.lr}), or set optim.autocast to none"
                )
            logged.append(sum(losses) / len(losses))
            row = {
                "train/loss": logged[-1],
                "train/grad_norm": norms[-1],
                "train/skipped_steps": float(since - len(losses)),
                "train/lr": optimizer.param_groups[0]["lr"],
                "perf/train_samples_per_s": step * optim.batch_size / (time.monotonic() - started),
            }
            losses, norms = [], []
            on_log(step, row)
    return logged[0], logged[-1]


def imitation_loss(policy: SupervisedPolicy, batch: DemoBatch, optim: FinetuneOptimConfig) -> torch.Tensor:
    """The policy's loss on a batch, in the configured precision."""
    device = batch.frames.device.type
    with torch.autocast(device, torch.bfloat16, enabled=optim.autocast == "bfloat16"):
        return policy.supervised_loss(batch.rows, batch.frames)
