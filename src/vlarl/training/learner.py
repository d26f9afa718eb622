"""The learner: one call to `update` turns an iteration's batch into a few optimizer steps.

for each epoch:          shuffle the rows, deal them out to minibatches
  for each minibatch:    zero the gradients once
    for each microbatch: score -> loss (divided by the whole minibatch's tokens) -> backward
    clip, refuse a gradient that is not finite, step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from vlarl.algorithms.base import Algorithm
from vlarl.config.schema import Config
from vlarl.observability.metrics import WeightedMeans
from vlarl.policies.base import Policy
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
        algorithm, optim = self.config.algorithm, self.config.optim
        train_policy = iteration > algorithm.value_init_steps
        factor = self._set_learning_rates()
        generator = torch.Generator().manual_seed(derive_seed(self.config.run.seed, iteration) % 2**63)
        metrics = WeightedMeans()
        steps_planned = algorithm.epochs * optim.minibatches
        num_steps = num_skipped = 0
        stopped_early = False
        for _ in range(algorithm.epochs):
            for rows in minibatches(len(batch), optim.minibatches, generator):
                first = num_steps + num_skipped == 0
                approx_kl = self._accumulate(batch, rows, train_policy, metrics, first)
                if algorithm.max_approx_kl is not None and approx_kl > algorithm.max_approx_kl:
                    stopped_early = True
                    break
                if self._step(train_policy, metrics):
                    num_steps += 1
                else:
                    num_skipped += 1
                on_step(num_steps + num_skipped, steps_planned)
            if stopped_early:
                break
        self.version += 1
        self.policy_updates += train_policy
        if batch.returns is not None and batch.old_values is not None:
            metrics.last("explained_variance", explained_variance(batch.returns, batch.old_values))
        reported = metrics.reduce() | {"lr": optim.lr * factor if train_policy else 0.0}
        return UpdateResult(reported, num_steps, num_skipped, stopped_early)

    def _set_learning_rates(self) -> float:
        """Set both learning rates for this update; returns the schedule's factor."""
        optim = self.config.optim
        factor = lr_factor(self.policy_updates, self.config.run.iterations, optim)
        set_lr(self.optimizer, optim.lr * factor)
        if self.critic_optimizer is not None:
            set_lr(self.critic_optimizer, optim.value_lr * factor)
        return factor

    def _accumulate(
        self, batch: TrainBatch, rows: torch.Tensor, train_policy: bool, metrics: WeightedMeans, first: bool
    ) -> float:
        """Gradients of one minibatch, microbatch by microbatch; returns its approximate KL from the acting policy."""
        for optimizer in self.optimizers():
            optimizer.zero_grad(set_to_none=True)
        over = denominators(batch, rows)
        kl_sum = 0.0
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
            if first:  # nothing has moved yet: engine and learner must agree
                metrics.max("ratio_first_minibatch_error", float(loss.maxima["ratio_error"]))
                metrics.add("engine_mismatch_kl", float(loss.token_sums["approx_kl"]), num_tokens)
            kl_sum += float(loss.token_sums["approx_kl"])
        return kl_sum / over.num_tokens

    def _step(self, train_policy: bool, metrics: WeightedMeans) -> bool:
        """Clip and step; a gradient that is not finite is thrown away, and False says so."""
        parameters = [p for p in self.policy.parameters() if p.grad is not None]
        norm = float(nn.utils.clip_grad_norm_(parameters, self.config.optim.max_grad_norm))
        if not np.isfinite(norm):
            return False
        metrics.add("grad_norm", norm, 1)
        for optimizer in self.optimizers():
            if train_policy or optimizer is self.critic_optimizer:
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


def explained_variance(returns: torch.Tensor, values: torch.Tensor) -> float:
    """How much of the returns' variance the critic foresaw: 1 is all of it, 0 no more than their mean would."""
    variance = returns.var()
    return float("nan") if variance == 0 else float(1 - (returns - values).var() / variance)
