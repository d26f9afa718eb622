"""The learner: `annotate` computes log-probs and values of a batch, `update` turns the batch into optimizer steps.

for each epoch:          shuffle the rows, distribute them over minibatches
  for each minibatch:    zero the gradients once; fix what each element counts in it
    for each microbatch: evaluate -> loss (its part of the whole minibatch's) -> backward
    the same for as many samples of a second dataset, which are imitated (`ptx.py`)
    refuse a loss or a gradient that is not finite; clip, step, take the weights into their average

Several ranks run this same program on the same batch: each takes its turn at the microbatches, gradients are summed,
and all ranks know all metrics (`ranks.py`); their weights may be sharded over them (`fsdp.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from vlarl.algorithms.base import Algorithm, Factor
from vlarl.algorithms.kl import build_kl_controller
from vlarl.algorithms.losses import high_entropy_tokens
from vlarl.config.derive import total_iterations, updates_in
from vlarl.config.schema import Config
from vlarl.decisions import TensorRows, TrainBatch
from vlarl.observability.metrics import WeightedMeans
from vlarl.policies.base import Evaluation, Policy
from vlarl.recording import release_recordings
from vlarl.rollout.tasks import derive_seed
from vlarl.training.annotate import Annotations, Needs
from vlarl.training.batch import (
    mean_by_trajectory,
    microbatches,
    minibatches,
    row_lengths,
    uncounted,
    value_weight,
    weighted,
    whole_minibatches,
)
from vlarl.training.critic import build_critic
from vlarl.training.dropout import remove_dropout
from vlarl.training.ema import WeightAverage
from vlarl.training.fsdp import Sharding, clip_gradients, shard, sum_gradients
from vlarl.training.halving import Microbatches, explained
from vlarl.training.importance import corrects, importance_weights
from vlarl.training.optim import build_adamw, lr_factor, set_lr
from vlarl.training.prepare import refuse_unsupported
from vlarl.training.ptx import Ptx
from vlarl.training.ranks import Ranks, SingleRank
from vlarl.training.recorded import recorded_passes
from vlarl.training.reference import reference_at_start, reference_here
from vlarl.training.swap import CRITIC
from vlarl.training.update_metrics import (
    MetricSums,
    PassSums,
    critic_metrics,
    imitation_sums,
    importance_sums,
    is_finite,
    mean_of,
    mismatch,
    note,
)
from vlarl.types import UpdateResult

Result = TypeVar("Result")


class Learner:
    """Owns the policy's trainable weights, the critic, the optimizers and the count of updates."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        config: Config,
        device: torch.device,
        ranks: Ranks = SingleRank(),  # noqa: B008 - it has no state
        sharding: Sharding = Sharding(),  # noqa: B008 - frozen
        ptx: Ptx | None = None,
    ) -> None:
        """A policy that is to be sharded may wait on the host; its parts go to the device. `ptx` is the second dataset,
        which is imitated; None without one."""
        refuse_unsupported(policy, config)
        if config.optim.packing:
            policy.use_packing()
        self.policy = policy
        self.algorithm = algorithm
        self.config = config
        self.device = device
        self.ranks = ranks
        self.ptx = ptx
        self.sharded = sharding.mode != "none"
        make_way = partial(release_recordings, device)
        self.microbatches = Microbatches(config.optim, ranks, device, self.sharded, make_way)
        self.version = 0  # grows with every update; engines carry the version they sample with
        self.policy_updates = 0  # the schedule's clock, which a critic warm-up leaves alone
        remove_dropout(policy)
        self.critic = build_critic(policy, algorithm, config)  # None: a head of the policy, or not needed
        if self.sharded:  # from here on: what follows keeps and moves each rank's part
            mesh = sharding.mesh(ranks, device)
            for network in self._networks():
                shard(network, sharding, mesh)
        self.kl = build_kl_controller(config.kl)
        self.reference = reference_here(policy, config) if config.kl.coef > 0 else None
        self.average = None if config.ema.beta is None else WeightAverage(policy, config.ema.beta)
        betas = config.optim.betas
        actor = [p for name, p in policy.named_parameters() if not name.startswith(CRITIC)]
        self.optimizer = build_adamw(actor, config.optim.lr, config.optim.weight_decay, betas)
        valuing = [p for name, p in policy.named_parameters() if name.startswith(CRITIC)]
        valuing = valuing if self.critic is None else list(self.critic.parameters())
        self.critic_optimizer = build_adamw(valuing, config.critic.lr, 0.0, betas) if valuing else None
        self._modules = [module for network in self._networks() for module in network.modules()]
        policy.eval()
        self.recorded = recorded_passes(self._pass, self._networks(), config.optim, device, ranks, sharding)

    @property
    def kl_coef(self) -> float:
        """The weight of the KL from the reference, as it is now."""
        return self.kl.coef

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
    def annotate(self, batch: TrainBatch, iteration: int, last: TensorRows | None = None) -> Annotations:
        """Log-probs and values of a batch before its first step: at most one pass of each network.

        `last` are the inputs of last observations, which have values. Rows are batched as in the first epoch: kernels
        round differently for different batches, and this way the first ratio is exactly 1.
        """
        schedule = self._schedule(batch, iteration)
        needs = Needs.of(self.config, len(schedule), self.algorithm.needs_critic)
        first_epoch = schedule[: len(schedule) // self.config.algorithm.epochs]
        has_head = needs.values and self.critic is None
        temperature = self.algorithm.temperature

        def own(part: TrainBatch) -> Annotations:
            found = Annotations()
            if needs.logprobs:
                evaluation = self.policy.evaluate(part.inputs, part.decisions, temperature)
                found = Annotations(evaluation.logprobs, evaluation.entropy, evaluation.values if has_head else None)
            elif has_head:
                found = Annotations(values=self.policy.values(part.inputs, part.decisions))
            if needs.values and self.critic is not None:
                found = replace(found, values=self.critic.values(part.inputs, part.decisions))
            return found.map(lambda column: column.float().cpu())

        def of_reference(part: TrainBatch) -> Annotations:
            evaluation = self.policy.evaluate(part.inputs, part.decisions, temperature)
            return Annotations(ref_logprobs=evaluation.logprobs.float().cpu())

        attempt = self.microbatches.attempt
        found = Annotations()
        if needs.logprobs or needs.values:
            found = attempt(lambda: self._each_row(batch, first_epoch, own))
        if self.reference is not None:
            with self.reference.in_place():
                reference = attempt(lambda: self._each_row(batch, first_epoch, of_reference))
            found = replace(found, ref_logprobs=reference.ref_logprobs)
        if needs.values and last is not None:
            found = replace(found, last_values=attempt(lambda: self._last_values(last)))
        return found

    def _each_row(
        self, batch: TrainBatch, minibatches: Sequence[torch.Tensor], work: Callable[[TrainBatch], Annotations]
    ) -> Annotations:
        """The annotations that `work` computes, in the order of the batch's rows."""
        found = [piece for rows in minibatches for piece in self._each_microbatch(batch, rows, work)]
        order = torch.argsort(torch.cat([micro for micro, _ in found]))
        return Annotations.cat([part for _, part in found]).rows(order)

    def _last_values(self, last: TensorRows) -> torch.Tensor:
        """[M, V] the critic's values of observations that no decision follows."""
        network = self.critic or self.policy
        pieces = microbatches(torch.arange(len(last)), self.microbatches.optim, row_lengths(last))

        def values(rows: torch.Tensor) -> torch.Tensor:
            return network.values(last.rows(rows).to(self.device)).float().cpu()

        found = torch.cat(self.microbatches.distribute(pieces, pieces[0][:1], values))
        return found[torch.argsort(torch.cat(list(pieces)))]

    def reference_at_start(self) -> None:
        """Point the reference at what the run started from, for a policy that has been trained since."""
        if self.reference is not None:
            device = torch.device("cpu") if self.sharded else self.device  # whole only on the host
            self.reference = reference_at_start(self.policy, self.config, device)

    def update(
        self, batch: TrainBatch, iteration: int, on_step: Callable[[int, int], None], iterations: int | None = None
    ) -> UpdateResult:
        """Train on a batch of decisions; `on_step` is called with how many optimizer steps are done, of how many.

        `iterations` are those of the whole run, as far as is known by now; without it, as configured.
        """
        steps = self.updating(batch, iteration, iterations)
        while True:
            try:
                on_step(*next(steps))
            except StopIteration as end:
                result: UpdateResult = end.value
                return result

    def updating(
        self, batch: TrainBatch, iteration: int, iterations: int | None = None
    ) -> Generator[tuple[int, int], None, UpdateResult]:
        """The same step by step: after each optimizer step, how many are done, of how many."""
        algorithm = self.config.algorithm
        train_policy = self.version >= algorithm.value_init_steps
        lr = self._set_learning_rates(train_policy, iterations or total_iterations(self.config) or iteration)
        metrics = WeightedMeans()
        schedule = self._schedule(batch, iteration)
        needs = Needs.of(self.config, len(schedule), self.algorithm.needs_critic)
        starts_at_engine = algorithm.old_logprobs == "engine"
        if (needs.logprobs and batch.learner_logprobs is None) or (starts_at_engine and batch.old_logprobs is None):
            raise ValueError("the batch has no log-probs of before the first step: annotate it first")
        if self.reference is not None and batch.ref_logprobs is None:
            raise ValueError("the batch has no log-probs of the reference: annotate it first")
        batch = self._corrected(batch, metrics)
        moved = starts_at_engine  # whether the policy may differ from the one of the old log-probs
        num_steps = num_skipped = num_samples = 0
        stopped_early = False
        for rows in schedule:
            sums = self._gradients(batch, rows, moved, train_policy, first=num_steps == 0)
            num_samples += len(rows)
            valid = is_finite(sums)
            limit = algorithm.max_approx_kl
            stopped_early = valid and limit is not None and mean_of(sums, "approx_kl") > limit
            if stopped_early:
                note(metrics, sums)
                break
            with explained("the optimizer's step"):
                stepped = valid and self._step(train_policy, metrics)
            if stepped:
                note(metrics, sums)  # those of a refused minibatch would make every mean NaN, and drive the KL's
                num_steps += 1
                moved = moved or train_policy
            else:
                num_skipped += 1
            yield num_steps + num_skipped, len(schedule)
        if num_steps or not num_skipped:  # an update whose steps were all refused did not happen
            self.version += 1
            self.policy_updates += train_policy
        results = metrics.reduce() | {"lr": lr} | critic_metrics(batch) | self.microbatches.take_retries()
        if self.reference is not None:
            results["kl_coef"] = self.kl.coef
        if "kl_ref" in results:
            self.kl.update(results["kl_ref"], int(batch.trajectory.max()) + 1)
        return UpdateResult(results, num_samples, num_steps, num_skipped, stopped_early)

    def _schedule(self, batch: TrainBatch, iteration: int) -> list[torch.Tensor]:
        """The rows of every minibatch of every epoch; they follow from the run's seed and the iteration alone."""
        generator = torch.Generator().manual_seed(derive_seed(self.config.run.seed, iteration) % 2**63)
        algorithm, count = self.config.algorithm, self.config.optim.minibatches
        whole = algorithm.aggregate == "sequence_mean" or algorithm.ratio_level == "sequence"
        return [
            rows
            for _ in range(algorithm.epochs)
            for rows in (
                whole_minibatches(batch.trajectory, count, generator)
                if whole
                else minibatches(len(batch), count, generator)
            )
        ]

    def own_rows(self, batch: TrainBatch, iteration: int) -> torch.Tensor:
        """The rows that this rank evaluates in an update, before which it annotates them."""
        lengths = row_lengths(batch.inputs, batch.decisions.sample)
        pieces = [microbatches(rows, self.microbatches.optim, lengths) for rows in self._schedule(batch, iteration)]
        own = [rows for each in pieces for rows in each[self.ranks.rank :: self.ranks.world_size]]
        return torch.cat(own) if own else torch.arange(0)

    def _set_learning_rates(self, train_policy: bool, iterations: int) -> float:
        """Set both learning rates for this update and return the policy's; each has a clock of its own."""
        optim, critic, updates = self.config.optim, self.config.critic, updates_in(iterations, self.config)
        policy_updates = updates - self.config.algorithm.value_init_steps
        factor = lr_factor(self.policy_updates, policy_updates, optim.schedule, optim.warmup_iterations)
        set_lr(self.optimizer, optim.lr * factor)
        if self.critic_optimizer is not None:
            warmup = optim.warmup_iterations if critic.warmup_iterations is None else critic.warmup_iterations
            schedule = critic.schedule or optim.schedule
            set_lr(self.critic_optimizer, critic.lr * lr_factor(self.version, updates, schedule, warmup))
        return optim.lr * factor if train_policy else 0.0

    def _corrected(self, batch: TrainBatch, metrics: WeightedMeans) -> TrainBatch:
        """The batch with weights of elements in their advantages, to which every surrogate is in proportion: those of
        stale data, and 0 for elements that are too certain to be trained on."""
        algorithm, advantages = self.config.algorithm, batch.advantages
        if algorithm.old_logprobs == "engine" or batch.learner_logprobs is None or advantages is None:
            return batch
        note(metrics, [mismatch(batch, batch.learner_logprobs)])
        if corrects(self.config):
            weights = importance_weights(batch, batch.learner_logprobs, algorithm.importance_cap)
            note(metrics, [importance_sums(weights, batch.mask, algorithm.importance_cap)])
            advantages = advantages * weights
        selected = None
        if algorithm.entropy_top_fraction < 1 and batch.entropy is not None:
            selected = high_entropy_tokens(batch.entropy, batch.mask, algorithm.entropy_top_fraction)
            advantages = torch.where(selected, advantages, 0.0)
        return replace(batch, advantages=advantages, selected=selected)

    @torch.no_grad()
    def _minibatch(self, batch: TrainBatch, rows: torch.Tensor, moved: bool) -> TrainBatch:
        """The batch with what the loss must know of this minibatch as a whole: weights, and ratios of trajectories."""
        batch = weighted(batch, rows, self.config.algorithm.aggregate)
        if self.config.algorithm.ratio_level != "sequence":
            return batch

        def log_ratios(part: TrainBatch) -> torch.Tensor:
            logprobs = self.policy.evaluate(part.inputs, part.decisions, self.algorithm.temperature).logprobs
            return (logprobs - _present(part.old_logprobs)).cpu()

        log_ratio = torch.zeros(batch.mask.shape)
        if moved:  # before that, all ratios are 1
            for micro, part in self._each_microbatch(batch, rows, log_ratios):
                log_ratio[micro] = part
        return replace(batch, sequence_log_ratio=mean_by_trajectory(log_ratio, batch.mask, batch.trajectory))

    def _each_microbatch(
        self, batch: TrainBatch, rows: torch.Tensor, work: Callable[[TrainBatch], Result]
    ) -> list[tuple[torch.Tensor, Result]]:
        """The rows of each microbatch, and what `work` makes of its decisions, on whichever rank's device they were."""
        pieces = microbatches(rows, self.microbatches.optim, row_lengths(batch.inputs, batch.decisions.sample))
        upcoming = iter(pieces[self.ranks.rank :: self.ranks.world_size][1:])  # after each of this rank's own

        def fetch_and_work(micro: torch.Tensor) -> Result:
            part = batch.rows(micro) if len(micro) else uncounted(batch.rows(rows[:1]))
            part = (part.pinned() if self.device.type == "cuda" else part).to(self.device)
            if self.recorded is not None:  # in annotations, too: kernels round differently for different shapes
                part = replace(part, inputs=part.inputs.rounded_up())
            if (following := next(upcoming, None)) is not None:
                batch.inputs.prefetch(following)
            return work(part)

        return list(zip(pieces, self.microbatches.distribute(pieces, rows[:0], fetch_and_work), strict=True))

    def _gradients(
        self, batch: TrainBatch, rows: torch.Tensor, moved: bool, train_policy: bool, first: bool
    ) -> list[MetricSums]:
        """Gradients of the minibatch of these rows, from their beginning again where memory ran out."""
        imitated = self.ptx.next_batch() if self.ptx is not None and train_policy else None

        def work() -> list[MetricSums]:
            return self._accumulate(self._minibatch(batch, rows, moved), rows, train_policy, first, imitated)

        return self.microbatches.attempt(work)

    def _accumulate(
        self,
        batch: TrainBatch,
        rows: torch.Tensor,
        train_policy: bool,
        first: bool,
        imitated: TrainBatch | None = None,
    ) -> list[MetricSums]:
        """Gradients of one minibatch, microbatch by microbatch; returns what all of them came to, on every rank."""
        for optimizer in self.optimizers():
            optimizer.zero_grad(set_to_none=self.recorded is None)  # recordings add to gradients where they are
        if self.recorded is not None:
            self.recorded.begin(value_weight(batch, rows), self.kl.coef)
        run = self.recorded or partial(self._pass, value_weight=value_weight(batch, rows), kl_coef=self.kl.coef)
        self._train_mode(True)  # here alone: recomputed layers belong to passes that a backward follows
        try:
            passes = self._each_microbatch(batch, rows, lambda part: run(part, train_policy))
            also = [] if self.ptx is None or imitated is None else self._imitate(imitated, self.ptx.coef)
        finally:
            self._train_mode(False)
        sums = [one.read(first) for _, one in passes] + also  # from here on the device is waited for
        if not self.sharded:
            sum_gradients((p for optimizer in self.optimizers() for p in _parameters(optimizer)), self.ranks)
        return sums

    def _pass(self, part: TrainBatch, train_policy: bool, value_weight: Factor, kl_coef: Factor) -> PassSums:
        """Forward and backward of one microbatch, which adds to the gradients. Nothing here waits for the device."""
        evaluation = self._evaluate(part, train_policy)
        loss = self.algorithm.loss(
            evaluation, part, value_weight=value_weight, kl_coef=kl_coef, train_policy=train_policy
        )
        torch.autograd.backward(loss.total)
        return PassSums.of(loss, part, evaluation)

    def _imitate(self, batch: TrainBatch, coef: float) -> list[MetricSums]:
        """Gradients of the supervised loss on samples of the second dataset, added to those of the minibatch."""
        rows = torch.arange(len(batch))

        def learn(part: TrainBatch) -> MetricSums:
            logprobs = torch.where(part.mask, self.policy.evaluate(part.inputs, part.decisions, 1.0).logprobs, 0.0)
            loss = -(_present(part.weights) * logprobs).sum() * coef
            torch.autograd.backward(loss)
            return imitation_sums(logprobs.detach(), part.mask, float(loss.detach()))

        return [sums for _, sums in self._each_microbatch(weighted(batch, rows, "token_mean"), rows, learn)]

    def _evaluate(self, part: TrainBatch, train_policy: bool) -> Evaluation:
        """Log-probs, entropies and values; while the critic warms up, no gradient reaches the policy."""
        options = self.config.algorithm
        evaluate = partial(
            self.policy.evaluate,
            part.inputs,
            part.decisions,
            self.algorithm.temperature,
            entropy_gradient=options.entropy_coef > 0,
            extras=("action_reconstruction",) if options.action_reconstruction_coef > 0 else (),
        )
        if self.critic is None:
            return evaluate(critic_only=not train_policy)
        with torch.set_grad_enabled(train_policy):
            evaluation = evaluate()
        return replace(evaluation, values=self.critic.values(part.inputs, part.decisions))

    def _train_mode(self, enabled: bool) -> None:
        """As `train` does; it would walk through thousands of modules in every minibatch, while the device waits."""
        for module in self._modules:
            module.__dict__["training"] = enabled

    def _networks(self) -> list[Policy]:
        """What is trained: the policy, and the critic where it is a network of its own."""
        return [self.policy] + ([self.critic] if self.critic is not None else [])

    def _step(self, train_policy: bool, metrics: WeightedMeans) -> bool:
        """Clip and step; a gradient that is not finite is thrown away, and False says so."""
        moving = [o for o in self.optimizers() if train_policy or o is self.critic_optimizer]
        together = {"grad_norm": [p for optimizer in moving for p in _parameters(optimizer)]}
        if self.critic is not None:  # networks apart are clipped apart
            together = {self._norm_name(optimizer): _parameters(optimizer) for optimizer in moving}
        limit = self.config.optim.max_grad_norm
        norms = {name: clip_gradients(parts, limit) for name, parts in together.items()}
        if self.ranks.any(not np.isfinite(list(norms.values())).all()):
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


def _present(column: torch.Tensor | None) -> torch.Tensor:
    assert column is not None
    return column


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
