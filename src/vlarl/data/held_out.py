"""Held-out episodes, as a validation reads them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.words import counted
from vlarl.data.demo_set import DemoSet
from vlarl.data.demos import DemoSource, Note
from vlarl.data.recorded_demos import NothingLeftError, RecordedSource, is_in_fraction
from vlarl.errors import UsageError
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.training.ranks import Ranks
from vlarl.training.sft import DemoBatch
from vlarl.training.validation import HeldOut, Validation

VALIDATION_NOISE = 0  # the seed of what losses on held-out decisions sample, the same in every validation


def split_played(
    demos: Sequence[DemoSet], sources: Sequence[DemoSource], fraction: float
) -> tuple[list[DemoSet], dict[str, DemoSet]]:
    """The sets to train on, and by name the held-out episodes of those that experts have played.

    Recorded datasets leave theirs out when they are read. A hash of an episode's actions decides.
    """
    kept, held_out = list(demos), {}
    for index, (part, source) in enumerate(zip(demos, sources, strict=True)):
        if fraction == 0 or isinstance(source, RecordedSource):
            continue
        ends = np.cumsum(part.episode_lengths)
        episodes = (part.actions[end - length : end] for end, length in zip(ends, part.episode_lengths, strict=True))
        mask = np.array([is_in_fraction(zlib.crc32(actions.tobytes()), fraction) for actions in episodes])
        if mask.all():
            raise UsageError(
                f"demos.holdout = {fraction} leaves no demonstration of {part.name} to train on: lower it, or raise "
                f"demos.episodes_per_task."
            )
        if mask.any():
            kept[index], held_out[part.name] = part.episodes(~mask), part.episodes(mask)
    return kept, held_out


def build_validation(
    config: FinetuneConfig,
    policy: SupervisedPolicy,
    sources: Sequence[DemoSource],
    played: Mapping[str, DemoSet],
    weights: Sequence[float],
    note: Note,
    device: torch.device,
    ranks: Ranks,
) -> Validation | None:
    """The validation of a run; None without held-out episodes. The policy has the statistics of all datasets.

    `played`: what `split_played` held out.
    """
    if config.demos.holdout == 0:
        return None
    parts: list[HeldOut] = []
    for source, weight in zip(sources, weights, strict=True):
        demos = read_held_out(source, note) if isinstance(source, RecordedSource) else played.get(source.name)
        if demos is None:
            note(f"{source.name}: demos.holdout = {config.demos.holdout} holds out none of its episodes")
            continue
        batch = held_out_batch(demos, policy, config.validation.samples)
        episodes = counted(len(demos.success), "episode")
        note(f"{source.name}: validated on {counted(len(batch), 'decision')} of {episodes}")
        parts.append(HeldOut(source.name, weight, batch))
    if not parts and config.validation.patience is not None:
        raise UsageError(
            f"validation.patience = {config.validation.patience}: there is no held-out episode to validate on; raise "
            f"demos.holdout (now {config.demos.holdout}), or leave the option out."
        )
    return Validation(policy, parts, config.optim, config.run.seed, device, ranks) if parts else None


def read_held_out(source: RecordedSource, note: Note) -> DemoSet | None:
    """The held-out episodes of a recorded dataset that would be imitated; None if there are none."""
    try:
        demos = source.collect(note, held_out=True)
    except NothingLeftError:
        return None
    if source.only_successful:
        return demos.successful() if demos.success.any() else None
    return demos


def held_out_batch(demos: DemoSet, policy: SupervisedPolicy, count: int) -> DemoBatch:
    """So many decisions of a set, or all, evenly spaced."""
    rows = np.unique(np.linspace(0, len(demos) - 1, min(count, len(demos))).round().astype(np.int64))
    policy.use_statistics(None, demos.name)
    instructions = [demos.instructions[index] for index in demos.instruction_ids[rows]]
    chosen = policy.demo_rows(instructions, demos.proprio[rows], demos.chunks(rows, policy.num_steps))
    chosen = policy.with_noise(chosen, VALIDATION_NOISE, range(len(rows)))
    return DemoBatch(chosen, policy.demo_frames([demos.images[int(row)] for row in rows]))
