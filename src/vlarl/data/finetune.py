"""Supervised fine-tuning: imitate demonstrations. All base models are made this way, including the built-in ones.

demos.py ─► DemoSet (frames, actions) ─► batches.py ─► training/sft.py, the policy's own loss ─► checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from vlarl.config.derive import default_run_name
from vlarl.config.finetune import DemoConfig, FinetuneConfig, FinetunePolicyConfig
from vlarl.config.mixtures import is_named, parse_mixture
from vlarl.config.paths import located
from vlarl.config.run_checkpoints import FINAL, PERIODIC
from vlarl.config.source.load import to_yaml
from vlarl.config.training_data import by_demonstrations
from vlarl.data.augmentation import AugmentedBatches
from vlarl.data.batches import DemoBatches
from vlarl.data.demo_set import DemoSet
from vlarl.data.demos import DemoSource, collect_demos, open_sources, refuse_other_robot
from vlarl.data.finetune_run import FinetuneRun
from vlarl.data.held_out import build_validation, split_played
from vlarl.data.mixtures import MixtureSampler, table
from vlarl.data.recorded_demos import RecordedSource
from vlarl.data.rlds.writer import STATISTICS
from vlarl.data.statistics import dataset_statistics
from vlarl.data.tabletop_demos import TABLETOP
from vlarl.devices import choose_device
from vlarl.envs.tabletop.geometry import PROPRIO_HIGH, PROPRIO_LOW
from vlarl.errors import UsageError
from vlarl.observability.machine import available_cores
from vlarl.observability.run_dir import RunDirectory
from vlarl.policies.checkpoint_json import write_json
from vlarl.policies.fresh import FRESH, FreshSizes
from vlarl.policies.load import load_supervised
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.policies.tiny import unit_statistics
from vlarl.policies.tiny_inputs import IMAGE_SIZE
from vlarl.training.sft import Batches, Imitation, imitate


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
    """Collect demonstrations, imitate them, and save a checkpoint in the run directory.

    `resume` is the folder of a run to resume, from its newest checkpoint or the given one.
    """
    if config.reward.labels != "none":
        from vlarl.data.reward_run import train_reward_model  # which imports this module

        return train_reward_model(config, resume, checkpoint)
    with ExitStack() as stack:  # what is refused leaves nothing behind
        if resume is None:
            name = config.run.name or default_run_name("finetune", config.run.seed, datetime.now())
            RunDirectory.refuse_existing(config.run.root, name)
        else:
            directory = RunDirectory.open(resume)
            lock = stack.enter_context(directory.lock())
        device = choose_device(config.run.device)
        torch.set_num_threads(config.run.num_threads or available_cores())
        torch.manual_seed(config.run.seed)
        policy, sources = start(config, device)
        if resume is None:
            directory = RunDirectory.create(config.run.root, name)
            lock = stack.enter_context(directory.claim())
            directory.write_config(to_yaml(located(config)))
        begun = FinetuneRun(config, directory, lock, resume is None, checkpoint)
        stack.pop_all()  # the run holds the lock
    with begun as run:
        collected, demo_success = collect_demos(sources, run.progress.note)
        demos, held_out = split_played(collected, sources, config.demos.holdout)
        statistics = {part.name: demo_statistics(part) for part in demos}
        for name, values in statistics.items():
            policy.add_statistics(name, values)
        write_json(directory.path / STATISTICS, statistics)
        names = [part.name for part in demos]
        sampler = MixtureSampler([len(part) for part in demos], sampling_weights(config.demos, demos), config.run.seed)
        imitation = Imitation(policy, config.optim)
        validation = build_validation(config, policy, sources, held_out, list(sampler.weights), run.progress.note)
        batches: Batches = DemoBatches(demos, policy, device, sampler)
        if config.augment.enabled:
            batches = AugmentedBatches(batches, config.augment, config.run.seed)
        run.begin(imitation, sampler, names, validation)
        if not run.is_over:
            imitate(imitation, batches, run.log, run.after_step)
        for line in table(sampler.drawn(names, imitation.state.iteration * config.optim.batch_size)):
            run.progress.note(line)
        run.finish()
    state = imitation.state
    folder = f"{PERIODIC}{state.iteration:06d}" if run.interrupted else FINAL
    return FinetuneSummary(
        directory.path,
        directory.checkpoints / folder,
        state.first_loss or 0.0,
        state.last_loss or 0.0,
        demo_success,
        None if run.interrupted else run.report(),
        run.interrupted,
        None if state.best is None else state.best_step,
        state.best,
    )


def start(config: FinetuneConfig, device: torch.device) -> tuple[SupervisedPolicy, list[DemoSource]]:
    """The policy to train, frozen and adapted as configured, and the sources of its demonstrations.

    A checkpoint defines how many views of which size it reads. A fresh model takes its sizes from the demonstrations.
    """
    settings, seed = config.policy, config.run.seed
    if settings.path in FRESH:
        size = config.demos.image_size or IMAGE_SIZE
        sources = open_sources(config.demos, seed, size, settings.num_images or 1)
        policy = fresh_policy(settings, seed, sources[0], size).to(device)
    else:
        policy = load_supervised(settings, device)
        size = config.demos.image_size or policy.image_size
        sources = open_sources(config.demos, seed, size, policy.num_images)
    for source in sources:
        refuse_other_robot(policy, source)
    policy.prepare_supervised(settings, config.lora, seed)
    recorded = [source.suite for source in sources if isinstance(source, RecordedSource)]
    policy.training_data = policy.training_data.joined(by_demonstrations(config.demos, *recorded))
    return policy, sources


def fresh_policy(
    settings: FinetunePolicyConfig, seed: int, source: DemoSource, image_size: int = IMAGE_SIZE
) -> SupervisedPolicy:
    """The tiny model with fresh weights, sized for a source's robot; its statistics come with the demonstrations."""
    try:
        sizes = FreshSizes(
            settings.chunk_length,
            settings.num_images or 1,
            settings.use_proprio is not False,
            image_size,
            source.action_dim,
            source.proprio_dim,
        )
        return FRESH[settings.path](seed, sizes, False)
    except ValueError as error:
        raise UsageError(f"policy: {settings.path} can't be made: {error}") from error


def sampling_weights(config: DemoConfig, demos: Sequence[DemoSet]) -> list[float]:
    """How often each set is sampled: as often as it has frames, unless a mixture says otherwise."""
    frames = [float(len(part)) for part in demos]
    if not config.mixture:
        return frames
    weights = [dataset.weight for dataset in parse_mixture(config.mixture)]
    by_frames = (config.mixture_weights or ("frames" if is_named(config.mixture) else "datasets")) == "frames"
    return [weight * size if by_frames else weight for weight, size in zip(weights, frames, strict=True)]


def demo_statistics(demos: DemoSet) -> Mapping[str, Any]:
    """The normalisation statistics of a set's robot, measured; the tabletop's bounds are known."""
    measured = dataset_statistics(demos.actions, demos.proprio, len(demos.success), demos.action_mask)
    if demos.name == TABLETOP:
        known = unit_statistics(PROPRIO_LOW, PROPRIO_HIGH)
        return measured | {name: measured[name] | columns for name, columns in known.items()}
    return measured
