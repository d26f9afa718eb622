"""Supervised training: the optimizer steps of `vlarl finetune`, on batches of demonstrated decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import nn

from vlarl.config.finetune import FinetuneOptimConfig
from vlarl.decisions import TensorRows
from vlarl.errors import VlarlError
from vlarl.policies.supervised import Supervised
from vlarl.training.optim import build_adamw, set_lr, warmup_cosine
from vlarl.training.stored_tensors import Trained

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class DemoBatch:
    """Demonstrated decisions, as the policy's loss reads them."""

    rows: TensorRows
    frames: torch.Tensor  # [B, …] uint8

    def __len__(self) -> int:
        return len(self.rows)

    def parts(self, size: int | None) -> Iterator[DemoBatch]:
        """Its microbatches of this size, of which the last may be smaller; None: the whole batch."""
        if size is None or size >= len(self):
            yield self
            return
        for first in range(0, len(self), size):
            part = slice(first, first + size)
            yield DemoBatch(self.rows.rows(part), self.frames[part])


class Batches(Protocol):
    """Demonstrations to train on."""

    def batch(self, first: int, size: int) -> DemoBatch:
        """Samples `first` … `first + size - 1` of the run, on the policy's device."""
        ...


@dataclass
class ImitationState:
    """The counters of a supervised run; samples and learning rate follow from its steps alone."""

    iteration: int = 0  # optimizer steps so far; tools that read runs know it by this name
    losses: list[float] = field(default_factory=list)  # of the steps since the last row that were not skipped
    norms: list[float] = field(default_factory=list)
    first_loss: float | None = None  # of the first row
    last_loss: float | None = None  # of the newest one
    best: float | None = None  # lowest val/l1 so far
    best_step: int = 0  # the step that it was measured after
    validations_since_best: int = 0


class Imitation:
    """A supervised run in progress: policy, optimizer and counters, which are all that a checkpoint has to hold."""

    def __init__(self, policy: Supervised, optim: FinetuneOptimConfig) -> None:
        self.policy, self.optim = policy, optim
        self.optimizer = build_adamw(policy.parameters(), optim.lr, optim.weight_decay, BETAS)
        self.state = ImitationState()

    @property
    def device(self) -> torch.device:
        """The device of the policy."""
        return next(self.policy.parameters()).device

    def named_trained(self) -> Iterator[Trained]:
        """Everything that the optimizer moves, by name."""
        for name, parameter in self.policy.named_parameters():
            if parameter.requires_grad:
                yield name, parameter, self.optimizer

    def step(self, batches: Batches) -> dict[str, float] | None:
        """The next optimizer step; the row of metrics that is due after it."""
        optim, state = self.optim, self.state
        state.iteration += 1
        set_lr(self.optimizer, optim.lr * warmup_cosine(state.iteration, optim.steps, optim.warmup_steps))
        batch = batches.batch((state.iteration - 1) * optim.batch_size, optim.batch_size)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(batch)
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), optim.max_grad_norm)
        value, size = float(loss), float(norm)
        if np.isfinite([value, size]).all():  # an L1 loss that is not finite still has a finite gradient
            self.optimizer.step()
            state.losses.append(value)
            state.norms.append(size)
        is_due = state.iteration % optim.log_interval == 0 or state.iteration == optim.steps
        return self._row() if is_due else None

    def _backward(self, batch: DemoBatch) -> torch.Tensor:
        """Add the gradients of the batch's mean loss, microbatch by microbatch; returns that loss."""
        losses = []
        for part in batch.parts(self.optim.microbatch_size):
            loss = imitation_loss(self.policy, part, self.optim) * (len(part) / len(batch))
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _row(self) -> dict[str, float]:
        """The metrics since the last row."""
        optim, state = self.optim, self.state
        since = (state.iteration - 1) % optim.log_interval + 1
        if not state.losses:
            raise VlarlError(
                f"loss or gradient were not finite in any of the {since} steps up to {state.iteration}: lower optim.lr "
                f"(now {optim.lr}), or set optim.autocast to none"
            )
        state.last_loss = sum(state.losses) / len(state.losses)
        state.first_loss = state.last_loss if state.first_loss is None else state.first_loss
        row = {
            "train/loss": state.last_loss,
            "train/grad_norm": state.norms[-1],
            "train/skipped_steps": float(since - len(state.losses)),
            "train/lr": self.optimizer.param_groups[0]["lr"],
        }
        state.losses, state.norms = [], []
        return row


def imitate(
    imitation: Imitation,
    batches: Batches,
    on_log: Callable[[int, dict[str, float]], None],
    after_step: Callable[[], bool] = lambda: True,
) -> tuple[float, float]:
    """Train to the last step, or until `after_step` returns false; returns the first and the last logged loss."""
    imitation.policy.train()
    state, optim = imitation.state, imitation.optim
    begun, started = state.iteration, time.monotonic()
    is_wanted = True
    while is_wanted and state.iteration < optim.steps:
        if (row := imitation.step(batches)) is not None:
            samples = (state.iteration - begun) * optim.batch_size
            on_log(state.iteration, row | {"perf/train_samples_per_s": samples / (time.monotonic() - started)})
        is_wanted = after_step()
    return state.first_loss or 0.0, state.last_loss or 0.0


def imitation_loss(policy: Supervised, batch: DemoBatch, optim: FinetuneOptimConfig) -> torch.Tensor:
    """The policy's loss on a batch, in the configured precision."""
    device = batch.frames.device.type
    with torch.autocast(device, torch.bfloat16, enabled=optim.autocast == "bfloat16"):
        return policy.supervised_loss(batch.rows, batch.frames)
