"""`vlarl finetune` of a reward model: on pairs of responses, on labelled steps, or on episodes.

rows, or demonstrations ─► reward_samples.py ─► reward_batches.py ─► training/sft.py, the model's own loss ─► checkpoint

What is trained differs from data/finetune.py, the run does not: it resumes to the bit, validates and reports alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import torch

from vlarl.config.derive import default_run_name
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.paths import located
from vlarl.config.run_checkpoints import FINAL, PERIODIC
from vlarl.config.source.load import to_yaml
from vlarl.config.words import counted
from vlarl.data.demo_set import DemoSet
from vlarl.data.demos import DemoSource, Note, collect_demos, open_sources
from vlarl.data.finetune import FinetuneSummary
from vlarl.data.finetune_run import FinetuneRun
from vlarl.data.held_out import read_held_out, split_played
from vlarl.data.mixtures import MixtureSampler
from vlarl.data.recorded_demos import RecordedSource
from vlarl.data.reward_batches import RewardBatches, RewardValidation
from vlarl.data.reward_samples import EpisodeStates, Samples, open_rows_of, refuse_one_kind
from vlarl.devices import choose_device
from vlarl.errors import UsageError
from vlarl.observability.machine import available_cores
from vlarl.observability.run_dir import RunDirectory
from vlarl.rewards.reward_checkpoint import begin_reward_model
from vlarl.rewards.reward_model import RewardModel
from vlarl.training.sft import Imitation, imitate

Collect = Callable[[Note], tuple[Samples, Samples | None]]


def train_reward_model(config: FinetuneConfig, resume: Path | None, checkpoint: Path | None) -> FinetuneSummary:
    """Train a reward model as configured, and save it in the run directory."""
    assert config.reward.labels != "none", "a policy is trained by data/finetune.py"
    with ExitStack() as stack:  # what is refused leaves nothing behind
        if resume is None:
            name = config.run.name or default_run_name("reward", config.run.seed, datetime.now())
            RunDirectory.refuse_existing(config.run.root, name)
        else:
            directory = RunDirectory.open(resume)
            lock = stack.enter_context(directory.lock())
        device = choose_device(config.run.device)
        torch.set_num_threads(config.run.num_threads or available_cores())
        torch.manual_seed(config.run.seed)
        model = begin_reward_model(config.policy, config.lora, config.run.seed, config.reward.labels, device)
        collect = opened_samples(config, model)
        if resume is None:
            directory = RunDirectory.create(config.run.root, name)
            lock = stack.enter_context(directory.claim())
            directory.write_config(to_yaml(located(config)))
        begun = FinetuneRun(config, directory, lock, resume is None, checkpoint)
        stack.pop_all()  # the run holds the lock
    with begun as run:
        note = run.progress.note
        train, held = collect(note)
        note(
            f"{train.name}: {counted(len(train), 'sample')} to train on, {0 if held is None else len(held):,} held out"
        )
        if held is None and config.validation.patience is not None:
            raise UsageError(
                f"validation.patience = {config.validation.patience}: nothing is held out to validate on; raise "
                f"demos.holdout (now {config.demos.holdout}), or leave the option out."
            )
        sampler = MixtureSampler([len(train)], [1.0], config.run.seed)
        validation = None
        if held is not None:
            validation = RewardValidation(model, held, config.validation.samples, config.optim)
            note(f"{held.name}: validated on {counted(len(validation), 'sample')}")
        imitation = Imitation(model, config.optim)
        run.begin(imitation, sampler, [train.name], validation)
        if not run.is_over:
            imitate(imitation, RewardBatches(train, model, device, sampler), run.log, run.after_step)
        run.finish()
    state = imitation.state
    folder = f"{PERIODIC}{state.iteration:06d}" if run.interrupted else FINAL
    return FinetuneSummary(
        directory.path,
        directory.checkpoints / folder,
        state.first_loss or 0.0,
        state.last_loss or 0.0,
        None,
        None if run.interrupted else run.report(),
        run.interrupted,
        None if state.best is None else state.best_step,
        agreement=dict(model.description.held_out),
    )


def opened_samples(config: FinetuneConfig, model: RewardModel) -> Collect:
    """A function that returns the samples to train on and those that are held out, None if there are none.

    Rows are read and checked here; episodes are played or read by the function.
    """
    labels, path = config.reward.labels, config.reward.path
    if labels in ("pairs", "steps"):
        assert path is not None, "checked with the configuration"
        found = open_rows_of(labels, Path(path), config.demos.holdout)
        return lambda note: found
    if not model.reads_images:
        raise UsageError(
            f"policy.path = {config.policy.path!r}: a model that reads no images can't score a robot's views; begin "
            "from a vision-language model, such as builtin:tiny-qwen2.5-vl."
        )
    size = model.description.image_size = config.demos.image_size or model.image_size
    demos = config.demos.model_copy(update={"only_successful": bool(config.demos.only_successful)})
    sources = open_sources(demos, config.run.seed, size, 1)
    if len(sources) > 1:
        names = ", ".join(each.name for each in sources)
        raise UsageError(f"demos: a reward model is trained on one dataset or simulator, and these are {names}.")
    return lambda note: _episodes(config, sources[0], note, size)


def _episodes(
    config: FinetuneConfig, source: DemoSource, note: Note, image_size: int
) -> tuple[Samples, Samples | None]:
    """States of a source's episodes, successes and failures."""
    collected, _ = collect_demos([source], note)
    (kept,), played = split_played(collected, [source], config.demos.holdout)
    held = played.get(source.name)
    if isinstance(source, RecordedSource) and config.demos.holdout > 0:
        held = read_held_out(source, note)
    train = _states(kept, config, "the", image_size)
    return train, None if held is None else _states(held, config, "the held-out", image_size)


def _states(demos: DemoSet, config: FinetuneConfig, what: str, image_size: int) -> EpisodeStates:
    refuse_one_kind(
        demos.success,
        f"{what} {counted(len(demos.success), 'episode')} of {demos.name}",
        "record failures, too (vlarl data record --keep-failures, rollouts), let experts fail (demos.close_high, "
        "demos.release_early), or change demos.holdout.",
    )
    return EpisodeStates(demos, config.reward.states_per_episode, config.reward.step_discount, image_size)
