"""A supervised run from its beginning to its end: `vlarl finetune`, here or on learner ranks of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import torch

from vlarl.config.derive import default_run_name
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.paths import located
from vlarl.config.run_checkpoints import FINAL, PERIODIC
from vlarl.config.source.load import to_yaml
from vlarl.data.demos import DemoSource, collect_demos
from vlarl.data.finetune import start
from vlarl.data.finetune_run import FinetuneRun
from vlarl.data.finetune_trainer import Collected, DemoTrainer, FinetuneTrainer
from vlarl.data.mixtures import table
from vlarl.data.reward_trainer import begin_reward_training
from vlarl.data.rlds.writer import STATISTICS
from vlarl.devices import choose_device
from vlarl.observability.machine import available_cores
from vlarl.observability.run_dir import RunDirectory
from vlarl.policies.checkpoint_json import write_json
from vlarl.training.sft import imitate

Build = Callable[[FinetuneRun, ExitStack], FinetuneTrainer]
"""Builds the trainer of a run; its workers, if there are any, end with the stack."""


@dataclass(frozen=True)
class FinetuneSummary:
    """The result of a supervised run."""

    run_dir: Path
    checkpoint: Path
    first_loss: float
    last_loss: float
    demo_success: float | None  # fraction of demonstrations that reached their goal; None: of a reward model
    report: Path | None = None
    interrupted: bool = False
    best_step: int | None = None  # the step with the lowest error on held-out episodes; None without validation
    best_l1: float | None = None
    agreement: Mapping[str, float] = field(default_factory=dict)  # of a reward model with the held-out labels


def finetune(config: FinetuneConfig, resume: Path | None = None, checkpoint: Path | None = None) -> FinetuneSummary:
    """Collect demonstrations or labels, train a policy or a reward model on them, and save it in the run directory.

    `resume` is the folder of a run to resume, from its newest checkpoint or the given one.
    """
    with ExitStack() as stack:  # what is refused leaves nothing behind
        if resume is None:
            kind = "finetune" if config.reward.labels == "none" else "reward"
            name = config.run.name or default_run_name(kind, config.run.seed, datetime.now())
            RunDirectory.refuse_existing(config.run.root, name)
        else:
            directory = RunDirectory.open(resume)
            lock = stack.enter_context(directory.lock())
        torch.set_num_threads(config.run.num_threads or available_cores())
        torch.manual_seed(config.run.seed)
        build = _opened(config)
        if resume is None:
            directory = RunDirectory.create(config.run.root, name)
            lock = stack.enter_context(directory.claim())
            directory.write_config(to_yaml(located(config)))
        begun = FinetuneRun(config, directory, lock, resume is None, checkpoint)
        stack.pop_all()  # the run holds the lock
    with ExitStack() as workers, begun as run:  # ranks are still there when the run saves its last checkpoint
        trainer = build(run, workers)
        if statistics := trainer.trained_on.statistics:
            write_json(directory.path / STATISTICS, statistics)
        run.begin(trainer)
        if not run.is_over:
            imitate(trainer, run.log, run.after_step)
        trained_on, state = trainer.trained_on, trainer.state
        num_samples = state.iteration * config.optim.batch_size
        for line in table(trained_on.sampler.drawn(trained_on.names, num_samples)) if statistics else ():
            run.progress.note(line)
        trainer.finish()
    state = trainer.state
    folder = f"{PERIODIC}{state.iteration:06d}" if run.interrupted else FINAL
    return FinetuneSummary(
        directory.path,
        directory.checkpoints / folder,
        state.first_loss or 0.0,
        state.last_loss or 0.0,
        trainer.trained_on.success,
        None if run.interrupted else run.report(),
        run.interrupted,
        None if state.best is None else state.best_step,
        state.best if config.reward.labels == "none" else None,
        trainer.agreement,
    )


def _opened(config: FinetuneConfig) -> Build:
    """What builds the trainer of a run; what can't be trained is refused here, before the run has a folder."""
    on_ranks = config.distributed.backend == "ray"
    # Ranks have weights of their own: the driver's policy says what of the demonstrations it reads.
    device = torch.device("meta") if on_ranks else choose_device(config.run.device)
    if config.reward.labels != "none":
        open_trainer = begin_reward_training(config, device)
        return lambda run, workers: open_trainer(run.directory.checkpoints, run.progress.note)
    policy, sources = start(config, device)
    if on_ranks:
        return lambda run, workers: _launch(config, sources, run, workers)

    def train_here(run: FinetuneRun, workers: ExitStack) -> FinetuneTrainer:
        collected = Collected(*collect_demos(sources, run.progress.note))
        return DemoTrainer(config, policy, sources, collected, device, run.directory.checkpoints, run.progress.note)

    return train_here


def _launch(
    config: FinetuneConfig, sources: Sequence[DemoSource], run: FinetuneRun, workers: ExitStack
) -> FinetuneTrainer:
    """The learner ranks, whose workers end with the stack. Experts play here, once for all of them."""
    from vlarl.run.finetune_cluster import launch_finetune  # loads Ray

    return launch_finetune(config, run.directory, sources, run.progress.note, workers)
