"""The training of `vlarl finetune`: a policy and its demonstrations, in one process or as one of several ranks.

    FinetuneRun ── step, validate, save … ──► DemoTrainer            this process (run/finetune.py)
                                          └─► DemoTrainer of each    distributed/finetune.py, behind the same interface
                                              learner rank

Every rank has all demonstrations, and reads those of its own samples. Sums over ranks make its results those of one
process (training/sft.py, training/validation.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from vlarl.config.finetune import FinetuneConfig, FinetuneOptimConfig
from vlarl.config.run_checkpoints import FINAL
from vlarl.data.augmentation import AugmentedBatches
from vlarl.data.batches import MAX_HELD_BYTES, DemoBatches
from vlarl.data.demo_set import DemoSet
from vlarl.data.demos import DemoSource, Note
from vlarl.data.finetune import demo_statistics, sampling_weights
from vlarl.data.held_out import build_validation, split_played
from vlarl.data.mixtures import MixtureSampler
from vlarl.data.statistics import pooled_statistics
from vlarl.errors import UsageError
from vlarl.observability.machine import gpu_peak_gib
from vlarl.policies.load import DTYPES
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.training.checkpoint import CheckpointStore
from vlarl.training.fsdp import Sharding
from vlarl.training.random_states import default_generators, restore_random_states
from vlarl.training.ranks import Ranks, SingleRank
from vlarl.training.sft import Batches, Imitation, ImitationState
from vlarl.training.sft_checkpoint import listed_frames, restore_imitation, save_imitation
from vlarl.training.stored_tensors import refuse_diverged
from vlarl.training.validation import WATCHED, Validates, is_best

BEST = "best_validation"  # checkpoint of the policy with the lowest error on held-out episodes


@dataclass(frozen=True)
class Collected:
    """Demonstrations that experts have played, or that were read: those to imitate."""

    demos: list[DemoSet]
    success: float  # fraction of all of them that reached their goal


@dataclass(frozen=True)
class TrainedOn:
    """What a supervised run is trained on."""

    names: tuple[str, ...]  # of the datasets
    sampler: MixtureSampler
    statistics: Mapping[str, Mapping[str, Any]]  # of a policy's demonstrations, by dataset
    success: float | None  # fraction of the demonstrations that reached their goal; None: of a reward model
    watched: str = WATCHED  # the metric whose lowest value is the best

    @property
    def frames(self) -> dict[str, int]:
        """Samples of each dataset."""
        return dict(zip(self.names, self.sampler.sizes, strict=True))


class FinetuneTrainer(Protocol):
    """What a supervised run trains, step by step."""

    optim: FinetuneOptimConfig
    trained_on: TrainedOn

    @property
    def state(self) -> ImitationState:
        """The counters so far."""
        ...

    def restore(self, checkpoint: Path) -> None:
        """Bring a run's beginning to the state of a checkpoint."""
        ...

    def step(self) -> dict[str, float] | None:
        """The next optimizer step; the row of metrics that is due after it."""
        ...

    def validate(self) -> dict[str, float] | None:
        """Measure the policy on held-out episodes, and save it if it is the best so far; None where there are none."""
        ...

    def save(self, name: str) -> None:
        """Write a checkpoint that training can resume from."""
        ...

    def finish(self) -> None:
        """Write the final policy."""
        ...

    @property
    def agreement(self) -> Mapping[str, float]:
        """How a reward model agrees with held-out labels; empty for a policy."""
        ...


class SupervisedTrainer:
    """Trains a policy or a reward model, in this process or as one of several ranks, which make the same calls."""

    def __init__(
        self,
        config: FinetuneConfig,
        imitation: Imitation,
        trained_on: TrainedOn,
        validation: Validates | None,
        folder: Path,
    ) -> None:
        """Checkpoints are kept in `folder`."""
        self.optim, self._seed = config.optim, config.run.seed
        self.trained_on, self._imitation, self._validation = trained_on, imitation, validation
        kept = config.checkpoint
        self._store = CheckpointStore(folder, kept.keep, imitation.ranks, max_total_gib=kept.max_total_gib)

    @property
    def state(self) -> ImitationState:
        """The counters so far, the same on all ranks."""
        return self._imitation.state

    @property
    def agreement(self) -> Mapping[str, float]:
        """How a reward model agrees with held-out labels."""
        return {}

    def restore(self, checkpoint: Path) -> None:
        """Bring a run's beginning to the state of a checkpoint."""
        restore_imitation(self._store, checkpoint, self._imitation, self.trained_on.frames, self._seed)
        state = self.state
        is_replaced = self._store.policy_metadata(BEST).get("training_step") != state.best_step
        if self._imitation.ranks.any(state.best is not None and is_replaced):
            # By that of a later step, which is taken again, perhaps with other options.
            state.best, state.best_step, state.validations_since_best = None, 0, 0

    def step(self) -> dict[str, float] | None:
        """The next optimizer step; the row of metrics that is due after it."""
        row = self._imitation.step()
        if row is not None and (peak := gpu_peak_gib()) is not None:
            row["perf/gpu_peak_gib"] = peak
        return row

    def validate(self) -> dict[str, float] | None:
        """Measure on what is held out, and save what is the best so far; None where nothing is."""
        if self._validation is None:
            return None
        row = self._validation.measure()
        if is_best(self.state, row[self._validation.watched]):
            note = {"training_step": self.state.iteration, **row}
            self._store.save_policy(BEST, self._imitation.policy, note, self._dtype)
        return row

    def save(self, name: str) -> None:
        """Write a checkpoint that training can resume from."""
        save_imitation(self._store, name, self._imitation, self.trained_on.frames, self._dtype)

    def finish(self) -> None:
        """Write the final policy."""
        imitation, state = self._imitation, self.state
        refuse_diverged(imitation.named_trained(), self.optim.lr, self._store.folder, imitation.ranks)
        note = {"training_step": state.iteration, "loss": state.last_loss}
        self._store.save_policy(FINAL, imitation.policy, note, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.optim.save_dtype]


class DemoTrainer(SupervisedTrainer):
    """Trains a policy on demonstrations."""

    def __init__(
        self,
        config: FinetuneConfig,
        policy: SupervisedPolicy,
        sources: Sequence[DemoSource],
        collected: Collected,
        device: torch.device,
        folder: Path,
        note: Note,
        ranks: Ranks = SingleRank(),  # noqa: B008 - it has no state
        sharding: Sharding = Sharding(),  # noqa: B008 - frozen
    ) -> None:
        """`policy` and `sources` are those of `start`, `collected` is what the sources have; checkpoints are kept in
        `folder`; `note` shows a line."""
        demos, held_out = split_played(collected.demos, sources, config.demos.holdout)
        statistics = {part.name: demo_statistics(part) for part in demos}
        weights = sampling_weights(config.demos, demos)
        policy.add_all_statistics(
            statistics,
            lambda: pooled_statistics([part.actions for part in demos], [part.proprio for part in demos], weights),
        )
        sampler = MixtureSampler([len(part) for part in demos], weights, config.run.seed)
        trained_on = TrainedOn(tuple(part.name for part in demos), sampler, statistics, collected.success)
        _refuse_other_demos(trained_on.frames, ranks)
        validation = build_validation(config, policy, sources, held_out, list(sampler.weights), note, device, ranks)
        ranks_here = max(config.distributed.learners_per_node) if ranks.world_size > 1 else 1
        batches: Batches = DemoBatches(demos, policy, device, sampler, MAX_HELD_BYTES // ranks_here)
        if config.augment.enabled:
            batches = AugmentedBatches(batches, config.augment, config.run.seed)
        imitation = Imitation(policy, config.optim, batches, device, ranks, sharding)
        if ranks.rank > 0:  # others than those of rank 0, which are those of one process
            restore_random_states(default_generators(device), {}, ranks.rank, config.run.seed)
        super().__init__(config, imitation, trained_on, validation, folder)


def _refuse_other_demos(frames: Mapping[str, int], ranks: Ranks) -> None:
    """Refuse ranks that have read different demonstrations: a sample's index would mean another frame on each."""
    for rank, other in enumerate(ranks.gather(dict(frames))):
        if other != frames:
            raise UsageError(
                f"demos.path: rank {ranks.rank} has read {listed_frames(frames)}, rank {rank} {listed_frames(other)}. "
                "All machines must see the same datasets under the same path: copy them again, or use a folder that "
                "all of them mount."
            )
