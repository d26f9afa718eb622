"""A supervised run from its beginning to its end: `vlarl finetune`, here or on learner ranks of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from vlarl.data.rlds.writer import STATISTICS
from vlarl.devices import choose_device
from vlarl.observability.machine import available_cores
from vlarl.observability.run_dir import RunDirectory
from vlarl.policies.checkpoint_json import write_json
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.training.sft import imitate


@dataclass(frozen=True)
class FinetuneSummary:
    """The result of a supervised run."""

    run_dir: Path
    checkpoint: Path
    first_loss: float
    last_loss: float
    demo_success: float  # fraction of demonstrations that reached their goal
    report: Path | None = None
    interrupted: bool = False
    best_step: int | None = None  # the step with the lowest error on held-out episodes; None without validation
    best_l1: float | None = None


def finetune(config: FinetuneConfig, resume: Path | None = None, checkpoint: Path | None = None) -> FinetuneSummary:
    """Collect demonstrations, imitate them, and save a checkpoint in the run directory.

    `resume` is the folder of a run to resume, from its newest checkpoint or the given one.
    """
    with ExitStack() as stack:  # what is refused leaves nothing behind
        if resume is None:
            name = config.run.name or default_run_name("finetune", config.run.seed, datetime.now())
            RunDirectory.refuse_existing(config.run.root, name)
        else:
            directory = RunDirectory.open(resume)
            lock = stack.enter_context(directory.lock())
        on_ranks = config.distributed.backend == "ray"
        # Ranks have weights of their own: the driver's policy says what of the demonstrations it reads.
        device = torch.device("meta") if on_ranks else choose_device(config.run.device)
        torch.set_num_threads(config.run.num_threads or available_cores())
        torch.manual_seed(config.run.seed)
        policy, sources = start(config, device)
        if resume is None:
            directory = RunDirectory.create(config.run.root, name)
            lock = stack.enter_context(directory.claim())
            directory.write_config(to_yaml(located(config)))
        begun = FinetuneRun(config, directory, lock, resume is None, checkpoint)
        stack.pop_all()  # the run holds the lock
    with ExitStack() as workers, begun as run:  # ranks are still there when the run saves its last checkpoint
        if on_ranks:
            trainer = _launch(config, directory, sources, run, workers)
        else:
            trainer = _train_here(config, policy, sources, device, run)
        write_json(directory.path / STATISTICS, trainer.trained_on.statistics)
        run.begin(trainer)
        if not run.is_over:
            imitate(trainer, run.log, run.after_step)
        trained_on, state = trainer.trained_on, trainer.state
        num_samples = state.iteration * config.optim.batch_size
        for line in table(trained_on.sampler.drawn(trained_on.names, num_samples)):
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
        state.best,
    )


def _train_here(
    config: FinetuneConfig,
    policy: SupervisedPolicy,
    sources: Sequence[DemoSource],
    device: torch.device,
    run: FinetuneRun,
) -> FinetuneTrainer:
    collected = Collected(*collect_demos(sources, run.progress.note))
    return DemoTrainer(config, policy, sources, collected, device, run.directory.checkpoints, run.progress.note)


def _launch(
    config: FinetuneConfig,
    directory: RunDirectory,
    sources: Sequence[DemoSource],
    run: FinetuneRun,
    workers: ExitStack,
) -> FinetuneTrainer:
    """The learner ranks, whose workers end with the stack. Experts play here, once for all of them."""
    from vlarl.run.finetune_cluster import launch_finetune  # loads Ray

    return launch_finetune(config, directory, sources, run.progress.note, workers)
