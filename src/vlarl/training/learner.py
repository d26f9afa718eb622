"""The learner: one call to `update` turns a batch into a few optimizer steps.

for each epoch:          shuffle the rows, deal them out to minibatches
  for each minibatch:    zero the gradients once; fix what each token counts in it
    for each microbatch: score -> loss (its share of the whole minibatch's) -> backward
    clip, refuse a gradient that is not finite, step, take the weights into their average
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from vlarl.algorithms.base import Algorithm
from vlarl.algorithms.kl import build_kl_controller, k3
from vlarl.algorithms.losses import high_entropy_tokens, masked_sum
from vlarl.config.derive import total_updates
from vlarl.config.schema import Config
from vlarl.observability.metrics import WeightedMeans
from vlarl.policies.base import Policy, Scores
from vlarl.policies.distribution import token_entropy, token_logprobs
from vlarl.rollout.tasks import derive_seed
from vlarl.training.batching import (
    mean_by_trajectory,
    microbatches,
    minibatches,
    observations_with_last,
    value_weight,
    weighted,
    whole_minibatches,
)
from vlarl.training.critic import build_critic
from vlarl.training.ema import WeightAverage
from vlarl.training.optim import build_adamw, lr_factor, set_lr
from vlarl.training.reference import reference_at_start, reference_here
from vlarl.training.swap import CRITIC
from vlarl.types import FloatArray, TrainBatch, Trajectory, TrajectoryGroup, UpdateResult


class Learner:
    """Owns the policy's trainable weights, the critic, the optimizers and the count of updates."""

    def __init__(self, policy: Policy, algorithm: Algorithm, config: Config, device: torch.device) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.config = config
        self.device = device
        self.version = 0  # grows with every update; engines carry the version they sample with
        self.policy_updates = 0  # the schedule's clock, which a critic warm-up leaves alone
        self.gathered: list[TrajectoryGroup] = []  # of rollouts that wait for the others of their update
        self.critic = build_critic(policy, algorithm, config)  # None: a head of the policy, or not needed
        self.kl = build_kl_controller(config.kl)
        self.reference = reference_here(policy, config) if config.kl.coef > 0 else None
        self.average = None if config.ema.beta is None else WeightAverage(policy, config.ema.beta)
        betas = config.optim.betas
        actor = [p for name, p in policy.named_parameters() if not name.startswith(CRITIC)]
        self.optimizer = build_adamw(actor, config.optim.lr, config.optim.weight_decay, betas)
        valuing = [p for name, p in policy.named_parameters() if name.startswith(CRITIC)]
        valuing = valuing if self.critic is None else list(self.critic.parameters())
        self.critic_optimizer = build_adamw(valuing, config.critic.lr, 0.0, betas) if valuing else None
        policy.eval()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by name, as engines take them."""
        for name, parameter in self.policy.named_parameters():
            yield name, parameter.detach()

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter, torch.optim.AdamW]]:
        """Everything that an optimizer moves, by name, with its optimizer."""
        named = list(self.policy.named_parameters())
        if self.critic is not None:
            named += [(f"critic.{name}", parameter) for name, parameter in self.critic.named_parameters()]
        owner = {id(p): optimizer for optimizer in self.optimizers() for p in _parameters(optimizer)}
        for name, parameter in named:
            if id(parameter) in owner:
                yield name, parameter, owner[id(parameter)]

    @torch.no_grad()
    def values(self, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
        """The critic's values [T+1, V] of each trajectory, the last observation included."""
        if not trajectories:
            return []
        network = self.critic or self.policy
        observations = [o for t in trajectories for o in observations_with_last(t)]
        size = self.config.optim.microbatch_size
        parts = []
        for start in range(0, len(observations), size):
            inputs = self.policy.process(observations[start : start + size])
            parts.append(network.values(inputs.to(self.device)).float().cpu().numpy())
        ends = np.cumsum([len(t.transitions) + 1 for t in trajectories])
        return np.split(np.concatenate(parts), ends[:-1])

    @torch.no_grad()
    def with_reference(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The groups with the reference's log-probs of every decision; as they are where there is no reference."""
        if self.reference is None:
            return list(groups)
        transitions = [t for group in groups for trajectory in group.trajectories for t in trajectory.transitions]
        size, logprobs = self.config.optim.microbatch_size, []
        with self.reference.in_place():
            for start in range(0, len(transitions), size):
                some = transitions[start : start + size]
                inputs = self.policy.process([t.observation for t in some]).to(self.device)
                ids = torch.from_numpy(np.stack([t.token_ids for t in some])).to(self.device)
                scores = self.policy.score(inputs, ids)
                places = ids - self.policy.codec.first_id
                logprobs += list(token_logprobs(scores.logits, places, self.algorithm.temperature).cpu().numpy())
        scored = iter(replace(t, ref_logprobs=row) for t, row in zip(transitions, logprobs, strict=True))
        return [
            TrajectoryGroup(
                tuple(
                    replace(trajectory, transitions=tuple(next(scored) for _ in trajectory.transitions))
                    for trajectory in group.trajectories
                )
            )
            for group in groups
        ]

    def reference_at_start(self) -> None:
        """Point the reference at what the run started from, for a policy that has learnt since."""
        if self.reference is not None:
            self.reference = reference_at_start(self.policy, self.config, self.device)

    def update(self, batch: TrainBatch, iteration: int, on_step: Callable[[int, int], None]) -> UpdateResult:
        """Train on a batch of decisions; `on_step` is told how many optimizer steps are done, of how many."""
        algorithm = self.config.algorithm
        train_policy = self.version >= algorithm.value_init_steps
        lr = self._set_learning_rates(train_policy)
        metrics = WeightedMeans()
        schedule = self._schedule(batch, iteration)
        per_epoch = len(schedule) // algorithm.epochs  # fewer than optim.minibatches when there are fewer rows
        batch = self._with_old_logprobs(batch, schedule[:per_epoch], metrics)
        moved = algorithm.old_logprobs == "engine"  # whether the policy may differ from the one of the old log-probs
        num_steps = num_skipped = num_samples = 0
        stopped_early = False
        for rows in schedule:
            minibatch = self._minibatch(batch, rows, moved)
            approx_kl = self._accumulate(minibatch, rows, train_policy, metrics, first=num_samples == 0)
            num_samples += len(rows)
            stopped_early = algorithm.max_approx_kl is not None and approx_kl > algorithm.max_approx_kl
            if stopped_early:
                break
            if self._step(train_policy, metrics):
                num_steps += 1
                moved = moved or train_policy
            else:
                num_skipped += 1
            on_step(num_steps + num_skipped, len(schedule))
        self.version += 1
        self.policy_updates += train_policy
        results = metrics.reduce() | {"lr": lr} | self._closing_metrics(batch)
        if "kl_ref" in results:
            self.kl.update(results["kl_ref"], int(batch.trajectory.max()) + 1)
        return UpdateResult(results, num_samples, num_steps, num_skipped, stopped_early)

    def _closing_metrics(self, batch: TrainBatch) -> dict[str, float]:
        """What is known of the batch as a whole."""
        metrics = {}
        if batch.returns is not None and batch.old_values is not None:
            counted = batch.value_mask
            metrics["explained_variance"] = explained_variance(batch.returns[counted], batch.old_values[counted])
        if self.reference is not None:
            metrics["kl_coef"] = self.kl.coef
        return metrics

    def _schedule(self, batch: TrainBatch, iteration: int) -> list[torch.Tensor]:
        """The rows of every minibatch of every epoch; they follow from the run's seed and the iteration alone."""
        generator = torch.Generator().manual_seed(derive_seed(self.config.run.seed, iteration) % 2**63)
        algorithm, shares = self.config.algorithm, self.config.optim.minibatches
        whole = algorithm.aggregate == "sequence_mean" or algorithm.ratio_level == "sequence"
        return [
            rows
            for _ in range(algorithm.epochs)
            for rows in (
                whole_minibatches(batch.trajectory, shares, generator)
                if whole
                else minibatches(len(batch), shares, generator)
            )
        ]

    def _set_learning_rates(self, train_policy: bool) -> float:
        """Set both learning rates for this update and return the policy's; each has a clock of its own."""
        optim, critic, updates = self.config.optim, self.config.critic, total_updates(self.config)
        policy_updates = updates - self.config.algorithm.value_init_steps
        factor = lr_factor(self.policy_updates, policy_updates, optim.schedule, optim.warmup_iterations)
        set_lr(self.optimizer, optim.lr * factor)
        if self.critic_optimizer is not None:
            warmup = optim.warmup_iterations if critic.warmup_iterations is None else critic.warmup_iterations
            schedule = critic.schedule or optim.schedule
            set_lr(self.critic_optimizer, critic.lr * lr_factor(self.version, updates, schedule, warmup))
        return optim.lr * factor if train_policy else 0.0

    @torch.no_grad()
    def _with_old_logprobs(
        self, batch: TrainBatch, first_epoch: Sequence[torch.Tensor], metrics: WeightedMeans
    ) -> TrainBatch:
        """The batch with this learner's log-probs in place of the engine's, and a note of how far they were apart.

        Rows go through the model in the company they will have in the first epoch: kernels round by batch, and this way
        the first ratio is 1 to the last bit. Tokens that are too certain to be learnt from lose their advantage.
        """
        algorithm = self.config.algorithm
        if algorithm.old_logprobs == "engine":
            return batch
        old_logprobs, entropies = torch.empty_like(batch.old_logprobs), torch.empty_like(batch.old_logprobs)
        for rows in first_epoch:
            for micro, part in self._microbatches(batch, rows):
                logits = self.policy.score(part.inputs, part.token_ids).logits
                learner_logprobs = token_logprobs(logits, part.places, self.algorithm.temperature)
                note_mismatch(part, learner_logprobs, metrics)
                old_logprobs[micro] = learner_logprobs.cpu()
                if algorithm.entropy_top_share < 1:
                    entropies[micro] = token_entropy(logits, self.algorithm.temperature).cpu()
        batch = replace(batch, old_logprobs=old_logprobs)
        if algorithm.entropy_top_share < 1:
            learnt = high_entropy_tokens(entropies, batch.mask, algorithm.entropy_top_share)
            batch = replace(batch, advantages=torch.where(learnt, batch.advantages, 0.0))
        return batch

    @torch.no_grad()
    def _minibatch(self, batch: TrainBatch, rows: torch.Tensor, moved: bool) -> TrainBatch:
        """The batch with what the loss must know of this minibatch as a whole: weights, and ratios of trajectories."""
        batch = weighted(batch, rows, self.config.algorithm.aggregate)
        if self.config.algorithm.ratio_level != "sequence":
            return batch
        log_ratio = torch.zeros(batch.mask.shape)
        if moved:  # before that, all ratios are 1
            for micro, part in self._microbatches(batch, rows):
                logits = self.policy.score(part.inputs, part.token_ids).logits
                learner_logprobs = token_logprobs(logits, part.places, self.algorithm.temperature)
                log_ratio[micro] = (learner_logprobs - part.old_logprobs).cpu()
        return replace(batch, sequence_log_ratio=mean_by_trajectory(log_ratio, batch.mask, batch.trajectory))

    def _microbatches(self, batch: TrainBatch, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, TrainBatch]]:
        """A minibatch in pieces: their rows, and the decisions on the device."""
        optim = self.config.optim
        lengths = batch.inputs.attention_mask.sum(dim=1) if optim.sort_by_length else None
        for micro in microbatches(rows, optim.microbatch_size, lengths):
            part = batch.rows(micro)
            yield micro, (part.pinned() if self.device.type == "cuda" else part).to(self.device)

    def _accumulate(
        self, batch: TrainBatch, rows: torch.Tensor, train_policy: bool, metrics: WeightedMeans, first: bool
    ) -> float:
        """Gradients of one minibatch, microbatch by microbatch; returns its approximate KL from the acting policy."""
        for optimizer in self.optimizers():
            optimizer.zero_grad(set_to_none=True)
        weight, kl_sum = value_weight(batch, rows), 0.0
        self._train_mode(True)  # here alone: dropout and recomputed layers belong to passes that a backward follows
        for _, part in self._microbatches(batch, rows):
            scores = self._score(part, train_policy)
            loss = self.algorithm.loss(
                scores, part, value_weight=weight, kl_coef=self.kl.coef, train_policy=train_policy
            )
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
        self._train_mode(False)
        return kl_sum / max(int(batch.mask[rows].sum()), 1)

    def _score(self, part: TrainBatch, train_policy: bool) -> Scores:
        """Logits and values; while the critic warms up, no gradient reaches the policy."""
        if self.critic is None:
            return self.policy.score(part.inputs, part.token_ids, critic_only=not train_policy)
        with torch.set_grad_enabled(train_policy):
            scores = self.policy.score(part.inputs, part.token_ids)
        return replace(scores, values=self.critic.values(part.inputs))

    def _train_mode(self, enabled: bool) -> None:
        for network in (self.policy, self.critic):
            if network is not None:
                network.train(enabled)

    def _step(self, train_policy: bool, metrics: WeightedMeans) -> bool:
        """Clip and step; a gradient that is not finite is thrown away, and False says so."""
        moving = [o for o in self.optimizers() if train_policy or o is self.critic_optimizer]
        together = {"grad_norm": [p for optimizer in moving for p in _parameters(optimizer)]}
        if self.critic is not None:  # networks apart are clipped apart
            together = {self._norm_name(optimizer): _parameters(optimizer) for optimizer in moving}
        limit = self.config.optim.max_grad_norm
        norms = {name: float(nn.utils.clip_grad_norm_(parts, limit)) for name, parts in together.items()}
        if not np.isfinite(list(norms.values())).all():
            return False
        for name, norm in norms.items():
            metrics.add(name, norm, 1)
        for optimizer in moving:
            optimizer.step()
        if self.average is not None and train_policy:
            self.average.update()
        return True

    def _norm_name(self, optimizer: torch.optim.AdamW) -> str:
        return "critic_grad_norm" if optimizer is self.critic_optimizer else "grad_norm"

    def optimizers(self) -> list[torch.optim.AdamW]:
        """The policy's optimizer, and the critic's where there is one."""
        return [self.optimizer] + ([self.critic_optimizer] if self.critic_optimizer is not None else [])


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
