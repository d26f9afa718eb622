"""Supervised training: the optimizer steps of `vlarl finetune`, on batches of demonstrated decisions.

    batch of a step    0 1 2 3 4 5 6 7      one process, all of it or in microbatches
                       └ rank 0┘└ rank 1┘   several ranks (ranks.py): each has the same part of every batch

The loss of a batch is the mean over its samples on all ranks: parts and microbatches are weighted by how many samples
they have, and gradients are summed, in each pass where weights are sharded (fsdp.py). All ranks know the whole
batch's loss and gradient norm, and so decide alike whether a step is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from vlarl.config.finetune import FinetuneOptimConfig
from vlarl.decisions import TensorRows
from vlarl.errors import VlarlError
from vlarl.policies.base import Policy
from vlarl.policies.supervised import Supervised
from vlarl.training.fsdp import Sharding, clip_gradients, shard, sum_gradients
from vlarl.training.optim import build_adamw, set_lr, warmup_cosine
from vlarl.training.ranks import Ranks, SingleRank
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
            yield self.part(slice(first, first + size))

    def part(self, rows: slice) -> DemoBatch:
        """Some of its decisions, not copied."""
        return DemoBatch(self.rows.rows(rows), self.frames[rows])


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

    def __init__(
        self,
        policy: Supervised,
        optim: FinetuneOptimConfig,
        batches: Batches,
        device: torch.device,
        ranks: Ranks = SingleRank(),  # noqa: B008 - it has no state
        sharding: Sharding = Sharding(),  # noqa: B008 - frozen
    ) -> None:
        """A policy that is to be sharded may wait on the host; its parts go to the device."""
        if optim.batch_size % ranks.world_size:
            raise ValueError(f"{ranks.world_size} ranks can't have equal parts of {optim.batch_size} samples")
        self.policy, self.optim, self.batches = policy, optim, batches
        self.device, self.ranks, self.sharded = device, ranks, sharding.mode != "none"
        if self.sharded:
            assert isinstance(policy, Policy), "reward models are trained in one process"
            shard(policy, sharding, sharding.mesh(ranks, device))
        self.optimizer = build_adamw(policy.parameters(), optim.lr, optim.weight_decay, BETAS)
        self.state = ImitationState()
        policy.train()

    def named_trained(self) -> Iterator[Trained]:
        """Everything that the optimizer moves, by name."""
        for name, parameter in self.policy.named_parameters():
            if parameter.requires_grad:
                yield name, parameter, self.optimizer

    def step(self) -> dict[str, float] | None:
        """The next optimizer step; the row of metrics that is due after it."""
        optim, state = self.optim, self.state
        state.iteration += 1
        set_lr(self.optimizer, optim.lr * warmup_cosine(state.iteration, optim.steps, optim.warmup_steps))
        size = optim.batch_size // self.ranks.world_size
        batch = self.batches.batch((state.iteration - 1) * optim.batch_size + self.ranks.rank * size, size)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(batch)
        trained = [parameter for _, parameter, _ in self.named_trained()]
        if not self.sharded:
            sum_gradients(trained, self.ranks)
        norm = clip_gradients(trained, optim.max_grad_norm)
        # An L1 loss that is not finite still has a finite gradient.
        if not self.ranks.any(not np.isfinite([loss, norm]).all()):
            self.optimizer.step()
            state.losses.append(loss)
            state.norms.append(norm)
        is_due = state.iteration % optim.log_interval == 0 or state.iteration == optim.steps
        return self._row() if is_due else None

    def _backward(self, batch: DemoBatch) -> float:
        """Add the gradients of this rank's part of the batch's mean loss, microbatch by microbatch; returns the mean
        loss of the batches of all ranks together."""
        losses, num_samples = [], len(batch) * self.ranks.world_size
        for part in batch.parts(self.optim.microbatch_size):
            loss = imitation_loss(self.policy, part, self.optim) * (len(part) / num_samples)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        own: list[float] = torch.stack(losses).tolist()
        return sum(value for each in self.ranks.gather(own) for value in each)

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


class Steps(Protocol):
    """What is trained step by step: an `Imitation`, or the ranks of one."""

    optim: FinetuneOptimConfig

    @property
    def state(self) -> ImitationState:
        """The counters so far."""
        ...

    def step(self) -> dict[str, float] | None:
        """The next optimizer step; the row of metrics that is due after it."""
        ...


def imitate(
    steps: Steps,
    on_log: Callable[[int, dict[str, float]], None],
    after_step: Callable[[], bool] = lambda: True,
) -> tuple[float, float]:
    """Train to the last step, or until `after_step` returns false; returns the first and the last logged loss."""
    optim = steps.optim
    begun, started = steps.state.iteration, time.monotonic()
    is_wanted = True
    while is_wanted and steps.state.iteration < optim.steps:
        if (row := steps.step()) is not None:
            step = steps.state.iteration
            samples = (step - begun) * optim.batch_size
            on_log(step, row | {"perf/train_samples_per_s": samples / (time.monotonic() - started)})
        is_wanted = after_step()
    return steps.state.first_loss or 0.0, steps.state.last_loss or 0.0


def imitation_loss(policy: Supervised, batch: DemoBatch, optim: FinetuneOptimConfig) -> torch.Tensor:
    """The policy's loss on a batch, in the configured precision."""
    device = batch.frames.device.type
    with torch.autocast(device, torch.bfloat16, enabled=optim.autocast == "bfloat16"):
        return policy.supervised_loss(batch.rows, batch.frames)
