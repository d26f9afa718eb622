"""The training of a reward model by `vlarl finetune`: on pairs of responses, on labelled steps, or on episodes.

rows, or demonstrations ─► reward_samples.py ─► reward_batches.py ─► training/sft.py, the model's own loss ─► checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.words import counted
from vlarl.data.demo_set import DemoSet
from vlarl.data.demos import DemoSource, Note, collect_demos, open_sources
from vlarl.data.finetune_trainer import FinetuneTrainer, SupervisedTrainer, TrainedOn
from vlarl.data.held_out import read_held_out, split_played
from vlarl.data.mixtures import MixtureSampler
from vlarl.data.recorded_demos import RecordedSource
from vlarl.data.reward_batches import RewardBatches, RewardValidation
from vlarl.data.reward_samples import EpisodeStates, Samples, open_rows_of, refuse_one_kind
from vlarl.errors import UsageError
from vlarl.rewards.reward_checkpoint import begin_reward_model
from vlarl.rewards.reward_model import RewardModel
from vlarl.training.sft import Imitation

Collect = Callable[[Note], tuple[Samples, Samples | None]]


def begin_reward_training(config: FinetuneConfig, device: torch.device) -> Callable[[Path, Note], FinetuneTrainer]:
    """A function that builds the trainer, with checkpoints in a folder; what can't be trained is refused before."""
    labels = config.reward.labels
    assert labels != "none", "a policy is trained by DemoTrainer"
    model = begin_reward_model(config.policy, config.lora, config.run.seed, labels, device)
    collect = opened_samples(config, model)
    return lambda folder, note: RewardTrainer(config, model, *collect(note), device, folder, note)


class RewardTrainer(SupervisedTrainer):
    """Trains a reward model on labelled samples."""

    def __init__(
        self,
        config: FinetuneConfig,
        model: RewardModel,
        train: Samples,
        held: Samples | None,
        device: torch.device,
        folder: Path,
        note: Note,
    ) -> None:
        """Validated on `held`; checkpoints are kept in `folder`; `note` shows a line."""
        self._model = model
        num_held = 0 if held is None else len(held)
        note(f"{train.name}: {counted(len(train), 'sample')} to train on, {num_held:,} held out")
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
        imitation = Imitation(model, config.optim, RewardBatches(train, model, device, sampler), device)
        trained_on = TrainedOn((train.name,), sampler, {}, None, RewardValidation.watched)
        super().__init__(config, imitation, trained_on, validation, folder)

    @property
    def agreement(self) -> Mapping[str, float]:
        """How the model agrees with held-out labels."""
        return self._model.description.held_out


def opened_samples(config: FinetuneConfig, model: RewardModel) -> Collect:
    """A function that returns the samples to train on and those that are held out, None if there are none.

    Rows are read and checked here; episodes are played or read by the function.
    """
    labels, path = config.reward.labels, config.reward.path
    if labels in ("pairs", "steps"):
        assert path is not None, "checked with the configuration"
        found = open_rows_of(labels, Path(path), config.demos.holdout, model.reads_images)
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
