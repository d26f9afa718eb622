"""Numbers that follow from a configuration. Pure, and never stored back into it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import datetime

from vlarl.config.known import BUILTIN_CHUNKS, MAX_STEPS, TASKS_PER_SUITE
from vlarl.config.schema import Config, FinetuneConfig


@dataclass(frozen=True)
class Derived:
    """What a training run amounts to. None: not known before the checkpoint is loaded."""

    world_size: int  # processes that learn
    num_tasks: int
    episodes_per_iteration: int  # the rollout batch
    decisions_per_iteration_max: int | None  # every episode lasting to the time limit
    iterations_per_update: int
    episodes_per_update: int  # the train batch
    episodes_per_minibatch: int  # on average, where minibatches are dealt from shuffled decisions
    decisions_per_microbatch_max: int
    optimizer_steps_per_update: int
    total_updates: int
    total_optimizer_steps: int
    total_episodes: int
    num_evaluations: int
    episodes_per_evaluation: int


@dataclass(frozen=True)
class FinetuneDerived:
    """What a supervised run amounts to."""

    world_size: int
    num_tasks: int
    num_demonstrations: int
    total_samples: int  # samples drawn over all steps


def total_updates(config: Config) -> int:
    """How often a run learns: after each iteration, or once for several; what is gathered at the end is learnt from."""
    return math.ceil(config.run.iterations / config.optim.rollouts_per_update)


def derive(config: Config) -> Derived:
    """The numbers of a training run."""
    episodes = config.rollout.num_groups * config.rollout.group_size
    gathered = config.optim.rollouts_per_update
    iterations, interval = config.run.iterations, config.eval.interval
    steps = config.algorithm.epochs * config.optim.minibatches
    num_tasks = len(config.env.task_ids) if config.env.task_ids is not None else TASKS_PER_SUITE
    chunk = config.policy.chunk_length or BUILTIN_CHUNKS.get(config.policy.path.removeprefix("builtin:"))
    max_steps = MAX_STEPS.get(config.env.suite)
    decisions = episodes * math.ceil(max_steps / chunk) if max_steps and chunk else None
    return Derived(
        world_size=1,
        num_tasks=num_tasks,
        episodes_per_iteration=episodes,
        decisions_per_iteration_max=decisions,
        iterations_per_update=gathered,
        episodes_per_update=episodes * gathered,
        episodes_per_minibatch=episodes * gathered // config.optim.minibatches,
        decisions_per_microbatch_max=config.optim.microbatch_size,
        optimizer_steps_per_update=steps,
        total_updates=total_updates(config),
        total_optimizer_steps=steps * total_updates(config),
        total_episodes=episodes * iterations,
        num_evaluations=2 + ((iterations - 1) // interval if interval else 0),
        episodes_per_evaluation=num_tasks * config.eval.states_per_task,
    )


def derive_finetune(config: FinetuneConfig) -> FinetuneDerived:
    """The numbers of a supervised run."""
    num_tasks = len(config.demos.suites) * TASKS_PER_SUITE
    return FinetuneDerived(
        world_size=1,
        num_tasks=num_tasks,
        num_demonstrations=num_tasks * config.demos.episodes_per_task,
        total_samples=config.optim.steps * config.optim.batch_size,
    )


def derived_lines(derived: Derived | FinetuneDerived) -> list[str]:
    """`name: value` for each number that is known."""
    values = ((f.name, getattr(derived, f.name)) for f in fields(derived))
    return [f"{name}: {value}" for name, value in values if value is not None]


def default_run_name(label: str, seed: int, now: datetime) -> str:
    """The name of a run that was given none: the preset's or file's name, the seed and the time."""
    return f"{label}_seed{seed}_{now:%Y%m%d_%H%M%S}"
