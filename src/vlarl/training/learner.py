"""The learner: one call to `update` turns an iteration's batch into a few optimizer steps.

for each epoch:          shuffle the rows, deal them out to minibatches
  for each minibatch:    zero the gradients once
    for each microbatch: score -> loss (divided by the whole minibatch's tokens) -> backward
    clip, refuse a gradient that is not finite, step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from vlarl.algorithms.base import Algorithm
from vlarl.algorithms.kl import k3
from vlarl.algorithms.losses import masked_sum
from vlarl.config.schema import Config
from vlarl.observability.metrics import WeightedMeans
from vlarl.policies.base import Policy
from vlarl.policies.distribution import token_logprobs
from vlarl.rollout.tasks import derive_seed
from vlarl.training.batching import denominators, microbatches, minibatches, observations_with_last
from vlarl.training.optim import build_adamw, lr_factor, set_lr
from vlarl.types import FloatArray, TrainBatch, Trajectory, UpdateResult

CRITIC = "value_head."  # prefix of the critic's parameters


class Learner:
    """Owns the policy's trainable weights, the optimizers and the count of updates."""

    def __init__(self, policy: Policy, algorithm: Algorithm, config: Config, device: torch.device) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.config = config
        self.device = device
        self.version = 0  # grows with every update; engines carry the version they sample with
        self.policy_updates = 0  # the schedule's clock, which a critic warm-up leaves alone
        optim = config.optim
        actor = [p for name, p in policy.named_parameters() if not name.startswith(CRITIC)]
        critic = [p for name, p in policy.named_parameters() if name.startswith(CRITIC)]
        self.optimizer = build_adamw(actor, optim.lr, optim.weight_decay, optim.betas)
        self.critic_optimizer = build_adamw(critic, optim.value_lr, 0.0, optim.betas) if critic else None
        policy.eval()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by name, as engines take them."""
        for name, parameter in self.policy.named_parameters():
            yield name, parameter.detach()

    @torch.no_grad()
    def values(self, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        """The critic's values [T+1] of each trajectory, the last observation included."""
        if not trajectories:
            return []
        observations = [o for t in trajectories for o in observations_with_last(t)]
        size = self.config.optim.microbatch_size
        parts = []
        for start in range(0, len(observations), size):
            inputs = self.policy.process(observations[start : start + size])
            parts.append(self.policy.values(inputs.to(self.device)).float().cpu().numpy())
        ends = np.cumsum([len(t.transitions) + 1 for t in trajectories])
        return np.split(np.concatenate(parts), ends[:-1])

    def update(self, batch: TrainBatch, iteration: int, on_step: Callable[[int, int], None]) -> UpdateResult:
        """Train on one iteration's decisions; `on_step` is told how many optimizer steps are done, of how many."""
        algorithm = self.config.algorithm
        train_policy = iteration > algorithm.value_init_steps
        lr = self._set_learning_rates(train_policy)
        metrics = WeightedMeans()
        schedule = self._schedule(len(batch), iteration)
        per_epoch = len(schedule) // algorithm.epochs  # fewer than optim.minibatches when there are fewer rows
        batch = self._with_old_logprobs(batch, schedule[:per_epoch], metrics)
        num_steps = num_skipped = num_samples = 0
        stopped_early = False
        for rows in schedule:
            approx_kl = self._accumulate(batch, rows, train_policy, metrics, first=num_samples == 0)
            num_samples += len(rows)
            stopped_early = algorithm.max_approx_kl is not None and approx_kl > algorithm.max_approx_kl
            if stopped_early:
                break
            if self._step(train_policy, metrics):
                num_steps += 1
            else:
                num_skipped += 1
            on_step(num_steps + num_skipped, len(schedule))
        self.version += 1
        self.policy_updates += train_policy
        if batch.returns is not None and batch.old_values is not None:
            metrics.last("explained_variance", explained_variance(batch.returns, batch.old_values))
        return UpdateResult(metrics.reduce() | {"lr": lr}, num_samples, num_steps, num_skipped, stopped_early)

    def _schedule(self, num_rows: int, iteration: int) -> list[torch.Tensor]:
        """The rows of every minibatch of every epoch; they follow from the run's seed and the iteration alone."""
        generator = torch.Generator().manual_seed(derive_seed(self.config.run.seed, iteration) % 2**63)
        epochs, shares = self.config.algorithm.epochs, self.config.optim.minibatches
        return [rows for _ in range(epochs) for rows in minibatches(num_rows, shares, generator)]

    def _set_learning_rates(self, train_policy: bool) -> float:
        """Set both learning rates for this update and return the policy's; each has a clock of its own."""
        optim, iterations = self.config.optim, self.config.run.iterations
        policy_iterations = iterations - self.config.algorithm.value_init_steps
        lr = optim.lr * lr_factor(self.policy_updates, policy_iterations, optim)
        set_lr(self.optimizer, lr)
        if self.critic_optimizer is not None:
            set_lr(self.critic_optimizer, optim.value_lr * lr_factor(self.version, iterations, optim))
        return lr if train_policy else 0.0

    @torch.no_grad()
    def _with_old_logprobs(
        self, batch: TrainBatch, first_epoch: Sequence[torch.Tensor], metrics: WeightedMeans
    ) -> TrainBatch:
        """The batch with this learner's log-probs in place of the engine's, and a note of how far they were apart.

        Rows go through the model in the company they will have in the first epoch: kernels round by batch, and this way
        the first ratio is 1 to the last bit.
        """
        if self.config.algorithm.old_logprobs == "engine":
            return batch
        old_logprobs = torch.empty_like(batch.old_logprobs)
        for rows in first_epoch:
            for micro in microbatches(rows, self.config.optim.microbatch_size):
                part = batch.rows(micro).to(self.device)
                scores = self.policy.score(part.inputs, part.token_ids)
                learner_logprobs = token_logprobs(scores.logits, part.places, self.algorithm.temperature)
                note_mismatch(part, learner_logprobs, metrics)
                old_logprobs[micro] = learner_logprobs.to(old_logprobs.device)
        return replace(batch, old_logprobs=old_logprobs)

    def _accumulate(
        self, batch: TrainBatch, rows: torch.Tensor, train_policy: bool, metrics: WeightedMeans, first: bool
    ) -> float:
        """Gradients of one minibatch, microbatch by microbatch; returns its approximate KL from the acting policy."""
        for optimizer in self.optimizers():
            optimizer.zero_grad(set_to_none=True)
        over = denominators(batch, rows)
        kl_sum = 0.0
        self.policy.train()  # here alone: dropout and recomputed layers belong to passes that a backward follows
        for micro in microbatches(rows, self.config.optim.microbatch_size):
            part = batch.rows(micro).to(self.device)
            scores = self.policy.score(part.inputs, part.token_ids)
            loss = self.algorithm.loss(scores, part, over, train_policy=train_policy)
            torch.autograd.backward(loss.total)
            num_tokens, num_decisions = int(part.mask.sum()), len(part)
            for name, total in loss.token_sums.items():
                metrics.add(name, float(total), num_tokens)
            for name, total in loss.decision_sums.items():
                metrics.add(name, float(total), num_decisions)
            metrics.max("ratio_max", float(loss.maxima["ratio_max"]))
            if first:  # nothing has moved yet, so the ratio must be 1
                metrics.max("ratio_first_minibatch_error", float(loss.maxima["ratio_error"]))
            kl_sum += float(loss.token_sums["approx_kl"])
        self.policy.eval()
        return kl_sum / over.num_tokens

    def _step(self, train_policy: bool, metrics: WeightedMeans) -> bool:
        """Clip and step; a gradient that is not finite is thrown away, and False says so."""
        moving = [o for o in self.optimizers() if train_policy or o is self.critic_optimizer]
        parameters = [p for optimizer in moving for group in optimizer.param_groups for p in group["params"]]
        norm = float(nn.utils.clip_grad_norm_(parameters, self.config.optim.max_grad_norm))
        if not np.isfinite(norm):
            return False
        metrics.add("grad_norm", norm, 1)
        for optimizer in moving:
            optimizer.step()
        return True

    def optimizers(self) -> list[torch.optim.AdamW]:
        """The policy's optimizer, and the critic's where there is one."""
        return [self.optimizer] + ([self.critic_optimizer] if self.critic_optimizer is not None else [])

    def optimizer_of(self, name: str) -> torch.optim.AdamW:
        """The optimizer that moves the named parameter."""
        if self.critic_optimizer is not None and name.startswith(CRITIC):
            return self.critic_optimizer
        return self.optimizer


def note_mismatch(part: TrainBatch, learner_logprobs: torch.Tensor, metrics: WeightedMeans) -> None:
    """Note how far the engine's log-probs (the batch's old ones, so far) are from the learner's."""
    gap = torch.where(part.mask, learner_logprobs - part.old_logprobs, 0.0)
    kl = masked_sum(k3(part.old_logprobs, learner_logprobs), part.mask)
    metrics.add("engine_mismatch_kl", float(kl), int(part.mask.sum()))
    metrics.max("engine_logprob_error", float(gap.abs().max()))


def explained_variance(returns: torch.Tensor, values: torch.Tensor) -> float:
    """How much of the returns' variance the critic foresaw: 1 is all of it, 0 no more than their mean would."""
    variance = returns.var()
    return float("nan") if variance == 0 else float(1 - (returns - values).var() / variance)
