"""Checkpoints of supervised training, from which it resumes to the bit.

A checkpoint is the policy in its original layout and the chosen precision, as everywhere, and beside it what training
resumes from: trainer.safetensors (the trained weights as they are, optimizer state, random states of all ranks) and
trainer.json (counters). Ranks whose weights are sharded write their parts of the former (shards.py). The policy that a
run resumes with is made as in the beginning, and then gets these weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vlarl.errors import UsageError
from vlarl.policies.tensor_file import write_tensors
from vlarl.training.checkpoint import COUNTERS, CheckpointStore, damaged, read_counters, verify
from vlarl.training.fsdp import consolidated
from vlarl.training.random_states import random_states, restore_random_states
from vlarl.training.ranks import on_first
from vlarl.training.sft import Imitation, ImitationState
from vlarl.training.shards import WEIGHTS, is_sharded, write_shards
from vlarl.training.stored_tensors import (
    TENSORS,
    fill,
    on_host,
    optimizer_tensors,
    refuse_diverged,
    restore_optimizers,
    restore_shards,
    stored_states,
    trained_tensors,
    with_prefix,
)

FRAMES = "frames"  # of each dataset: a sample's index means another frame if they have changed


def save_imitation(
    store: CheckpointStore, name: str, imitation: Imitation, frames: Mapping[str, int], dtype: torch.dtype
) -> Path:
    """Write a checkpoint that training can resume from; all ranks must call."""
    refuse_diverged(imitation.named_trained(), imitation.optim.lr, store.folder, store.ranks)
    tensors = trained_tensors(imitation.named_trained()) | optimizer_tensors(imitation.named_trained())
    tensors |= random_states(store.generators(imitation.device), store.ranks)

    def write_whole(folder: Path) -> None:
        imitation.policy.save(folder, dtype)
        if not imitation.sharded:
            write_tensors(on_host(tensors), folder / TENSORS)
        counters = asdict(imitation.state) | {FRAMES: dict(frames)}
        (folder / COUNTERS).write_text(json.dumps(counters, indent=2))

    def write(folder: Path) -> None:
        if imitation.sharded:
            write_shards(tensors, folder)
        with consolidated(imitation.policy, store.ranks):
            on_first(store.ranks, lambda: write_whole(folder))

    return store.write(name, write)


def restore_imitation(
    store: CheckpointStore, checkpoint: Path, imitation: Imitation, frames: Mapping[str, int], seed: int
) -> None:
    """Bring a run's beginning to the state of the checkpoint, which any number of ranks has written; all ranks must
    call."""
    counters = read_counters(checkpoint)
    before = counters.pop(FRAMES, None)
    if before != dict(frames):
        trained_on = listed_frames(before if isinstance(before, dict) else {})
        raise UsageError(
            f"the demonstrations have changed: there are {listed_frames(frames)}, and the checkpoint {checkpoint} was "
            f"trained on {trained_on}. A run resumes on the same ones; to train on others, start a new one from its "
            "weights with --policy.path."
        )
    own = store.generators(imitation.device)
    try:
        verify(checkpoint, store.ranks)
        if is_sharded(checkpoint):
            states = restore_shards(imitation.named_trained(), {}, checkpoint, own, store.ranks)
        else:
            tensors = load_file(checkpoint / TENSORS)
            fill({name: parameter for name, parameter, _ in imitation.named_trained()}, with_prefix(tensors, WEIGHTS))
            restore_optimizers(imitation.named_trained(), tensors)
            states = stored_states(own, store.ranks.rank, tensors)
        imitation.policy.weights_changed()
        imitation.state = _state(counters)
        restore_random_states(own, states, store.ranks.rank, seed)  # last: loading may sample
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UsageError(damaged(checkpoint, error)) from error


def _state(counters: dict[str, object]) -> ImitationState:
    """The counters of a run; those of the wrong type are refused."""
    state = ImitationState(**counters)  # type: ignore[arg-type]  # checked below
    for name in ("losses", "norms"):
        values = getattr(state, name)
        if not isinstance(values, list) or not all(map(_is_number, values)):
            raise ValueError(f"{name} in {COUNTERS} is {str(values)[:40]!r}, which must be a list of numbers")
    for name in ("first_loss", "last_loss", "best"):
        value = getattr(state, name)
        if value is not None and not _is_number(value):
            raise ValueError(f"{name} in {COUNTERS} is {str(value)[:40]!r}, which must be a number")
    for name in ("iteration", "best_step", "validations_since_best"):
        count = getattr(state, name)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"{name} in {COUNTERS} is {str(count)[:40]!r}, which must be a whole number of 0 or more")
    return state


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def listed_frames(frames: Mapping[str, int]) -> str:
    """How many frames of which datasets, in words."""
    return ", ".join(f"{count:,} frames of {name}" for name, count in frames.items()) or "none"
