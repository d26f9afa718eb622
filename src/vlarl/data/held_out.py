"""The held-out episodes of recorded datasets, as a validation reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.words import counted
from vlarl.data.demo_set import DemoSet
from vlarl.data.demos import DemoSource, Note
from vlarl.data.recorded_demos import NothingLeftError, RecordedSource
from vlarl.errors import UsageError
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.training.sft import DemoBatch
from vlarl.training.validation import HeldOut, Validation


def build_validation(
    config: FinetuneConfig,
    policy: SupervisedPolicy,
    sources: Sequence[DemoSource],
    weights: Sequence[float],
    note: Note,
) -> Validation | None:
    """The validation of a run; None without held-out episodes. The policy has the statistics of all datasets."""
    if config.demos.holdout == 0:
        return None
    parts: list[HeldOut] = []
    for source, weight in zip(sources, weights, strict=True):
        assert isinstance(source, RecordedSource), "a rule refuses demos.holdout without demos.path"
        try:
            demos = source.collect(note, held_out=True)
        except NothingLeftError:
            note(f"{source.name}: demos.holdout = {config.demos.holdout} holds out none of its episodes")
            continue
        if source.only_successful:
            if not demos.success.any():
                note(f"{source.name}: none of its held-out episodes succeeded, so it is not validated on")
                continue
            demos = demos.successful()
        batch = held_out_batch(demos, policy, config.validation.samples)
        note(
            f"{source.name}: validated on {counted(len(batch), 'decision')} of {counted(len(demos.success), 'episode')}"
        )
        parts.append(HeldOut(source.name, weight, batch))
    if not parts and config.validation.patience is not None:
        raise UsageError(
            f"validation.patience = {config.validation.patience}: there is no held-out episode to validate on; raise "
            f"demos.holdout (now {config.demos.holdout}), or leave the option out."
        )
    return Validation(policy, parts, config.optim, config.run.seed) if parts else None


def held_out_batch(demos: DemoSet, policy: SupervisedPolicy, count: int) -> DemoBatch:
    """So many decisions of a set, or all, evenly spaced."""
    rows = np.unique(np.linspace(0, len(demos) - 1, min(count, len(demos))).round().astype(np.int64))
    policy.use_statistics(None, demos.name)
    instructions = [demos.instructions[index] for index in demos.instruction_ids[rows]]
    chosen = policy.demo_rows(instructions, demos.proprio[rows], demos.chunks(rows, policy.num_steps))
    return DemoBatch(chosen, policy.demo_frames([demos.images[int(row)] for row in rows]))
