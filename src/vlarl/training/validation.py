"""How well a policy imitates episodes that it is not trained on, and when training ends because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vlarl.config.finetune import FinetuneOptimConfig
from vlarl.config.words import agreement_in_words
from vlarl.policies.supervised import Supervised, SupervisedPolicy
from vlarl.training.ranks import Ranks, SingleRank, distribute
from vlarl.training.sft import DemoBatch, ImitationState, imitation_loss

WATCHED = "val/l1"
ACCURACY = "val/token_accuracy"


class Validates(Protocol):
    """A measurement on what is held out."""

    watched: str  # the metric whose lowest value is the best

    @property
    def policy(self) -> Supervised:
        """What is measured."""
        ...

    def measure(self) -> dict[str, float]:
        """Metrics whose names begin with val/; what is trained and its random numbers are the same afterwards."""
        ...


def in_words(row: Mapping[str, float]) -> str:
    """What a validation has found, for people."""
    if WATCHED not in row:
        return agreement_in_words({name.removeprefix("val/"): value for name, value in row.items()})
    accuracy = f", token accuracy {row[ACCURACY]:.1%}" if ACCURACY in row else ""
    return f"L1 {row[WATCHED]:.4f}{accuracy}"


@dataclass(frozen=True)
class HeldOut:
    """Decisions of the held-out episodes of a dataset, on the host."""

    name: str
    weight: float  # of the dataset in training, relative to the others
    batch: DemoBatch


class Validation:
    """Measures a policy on held-out decisions; the random numbers of training are the same without it.

    Ranks take their turns at the passes, and all of them have the results.
    """

    watched = WATCHED

    def __init__(
        self,
        policy: SupervisedPolicy,
        parts: Sequence[HeldOut],
        optim: FinetuneOptimConfig,
        seed: int,
        device: torch.device,
        ranks: Ranks = SingleRank(),  # noqa: B008 - it has no state
    ) -> None:
        """`device` is the one that the policy's passes run on."""
        self.policy, self._parts, self._optim, self._seed = policy, tuple(parts), optim, seed
        self._device, self._ranks = device, ranks

    def measure(self) -> dict[str, float]:
        """Loss, absolute error of normalised actions, and token accuracy of policies with action tokens.

        Each is the mean over a dataset's decisions, and over datasets by their weights.
        """
        device = self._device
        self.policy.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self._seed)  # for losses that sample: the same in every validation
            found = [self._of(part.batch) for part in self._parts]
        self.policy.train()
        total = sum(part.weight for part in self._parts)
        row = {
            f"val/{name}": sum(part.weight * values[name] for part, values in zip(self._parts, found, strict=True))
            / total
            for name in found[0]
        }
        if len(found) > 1:
            for part, values in zip(self._parts, found, strict=True):
                row |= {f"val/{part.name}/{name}": value for name, value in values.items()}
        return row

    def _of(self, batch: DemoBatch) -> dict[str, float]:
        size = self._optim.microbatch_size or self._optim.batch_size // self._ranks.world_size
        sums: dict[str, float] = {}
        for values in distribute(list(batch.parts(size)), batch.part(slice(1)), self._sums, self._ranks):
            sums = {name: sums.get(name, 0.0) + value for name, value in values.items()}
        return {name: value / len(batch) for name, value in sums.items()}

    def _sums(self, part: DemoBatch) -> dict[str, float]:
        """Over the decisions of a pass."""
        here = DemoBatch(part.rows.to(self._device), part.frames.to(self._device))
        loss = imitation_loss(self.policy, here, self._optim)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._optim.autocast == "bfloat16"):
            errors = self.policy.imitation_errors(here.rows, here.frames)
        values = {"loss": float(loss) * len(part), "l1": float(errors.l1.double().sum())}
        if errors.token_accuracy is not None:
            values["token_accuracy"] = float(errors.token_accuracy.double().sum())
        return values


def is_best(state: ImitationState, value: float) -> bool:
    """Note a validation down: whether it is the best so far."""
    if state.best is None or value < state.best:
        state.best, state.best_step, state.validations_since_best = value, state.iteration, 0
        return True
    state.validations_since_best += 1
    return False


def is_exhausted(state: ImitationState, patience: int | None) -> bool:
    """Whether training ends because no validation was better for too long."""
    return patience is not None and state.validations_since_best >= patience
