"""Supervised runs by one process and by several ranks, and what is compared of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rank_cases import CPU

from vlarl.config.finetune import FinetuneConfig
from vlarl.data.demos import collect_demos
from vlarl.data.finetune import start
from vlarl.data.finetune_trainer import Collected, DemoTrainer
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.training.fsdp import Sharding, whole
from vlarl.training.ranks import Ranks, SingleRank

STEPS, BATCH, SAVED = 4, 8, "step_000002"
PLAIN: dict[str, dict[str, Any]] = {
    "optim": {"steps": STEPS, "batch_size": BATCH, "lr": 1e-3, "warmup_steps": 0, "log_interval": 1},
    "demos": {"holdout": 0.4},
    "validation": {"samples": 7},
    "checkpoint": {"keep": 9},
}


@dataclass(frozen=True)
class Case:
    """A supervised run: its base, and its options beside PLAIN."""

    base: str  # a folder of the bases
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    sharding: Sharding = field(default_factory=lambda: Sharding("full"))


@dataclass
class Outcome:
    """What a run came to."""

    rows: list[dict[str, float]] = field(default_factory=list)  # of steps and validations
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # all of them, on every rank
    num_local: int = 0  # values of the policy that this rank keeps


def configured(case: Case, root: Path, microbatch_size: int | None = None) -> FinetuneConfig:
    """The case's configuration, with passes of this size unless it says another; `root` has recordings and bases."""
    plain = {name: dict(values) for name, values in PLAIN.items()}
    plain["demos"] |= {"path": str(root / "data" / "mine"), "mapping": str(root / "data" / "mine.yaml")}
    plain["policy"] = {"path": str(root / case.base)}
    plain["optim"] |= {"microbatch_size": microbatch_size}
    for name, values in case.sections.items():
        plain[name] = plain.get(name, {}) | values
    if "suites" in plain["demos"]:
        plain["demos"] = {key: value for key, value in plain["demos"].items() if key not in ("path", "mapping")}
    return FinetuneConfig.model_validate(plain)


def build(config: FinetuneConfig, case: Case, folder: Path, ranks: Ranks) -> tuple[DemoTrainer, SupervisedPolicy]:
    """A trainer as the command builds one, here or on ranks, with checkpoints in the folder."""
    sharding = Sharding() if isinstance(ranks, SingleRank) else case.sharding
    torch.manual_seed(config.run.seed)
    policy, sources = start(config, CPU, deferred=sharding.mode != "none")
    collected = Collected(*collect_demos(sources, lambda line: None))
    return DemoTrainer(config, policy, sources, collected, CPU, folder, lambda line: None, ranks, sharding), policy


def run(
    case: Case,
    root: Path,
    folder: Path,
    ranks: Ranks,
    microbatch_size: int | None = None,
    resume: Path | None = None,
) -> Outcome:
    """All steps with a validation after each second one, and a checkpoint after it; or those after a checkpoint."""
    config, outcome = configured(case, root, microbatch_size), Outcome()
    trainer, policy = build(config, case, folder, ranks)
    if resume is not None:
        trainer.restore(resume)
    while trainer.state.iteration < STEPS:
        outcome.rows.append(trainer.step() or {})
        if trainer.state.iteration % 2 == 0:
            outcome.rows.append(trainer.validate() or {})
            trainer.save(f"step_{trainer.state.iteration:06d}")
    trainer.finish()
    outcome.weights = {name: whole(weight.detach()).clone() for name, weight in policy.named_parameters()}
    outcome.num_local = sum(getattr(p, "_local_tensor", p).numel() for p in policy.parameters())
    return outcome


def gap(found: Outcome, expected: Outcome) -> float:
    """The largest difference of a metric (of its size where that is above 1) or a weight."""
    assert len(found.rows) == len(expected.rows) > 0 and found.weights.keys() == expected.weights.keys()
    largest = max(float((found.weights[n] - w).abs().max()) for n, w in expected.weights.items() if w.numel())
    for mine, theirs in zip(found.rows, expected.rows, strict=True):
        assert mine.keys() == theirs.keys() and theirs
        largest = max(largest, *(abs(mine[n] - value) / max(1.0, abs(value)) for n, value in theirs.items()))
    return largest


def is_equal(found: Outcome, expected: Outcome) -> bool:
    """To the bit."""
    same = all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    return same and found.rows == expected.rows[len(expected.rows) - len(found.rows) :]
