"""Checkpoints: written to a temporary folder, synced, then renamed, so that a crash leaves the old one intact.

A checkpoint is the policy in its original layout (usable by itself) plus `trainer.safetensors` (optimizer state,
averages of the weights, random states of all ranks), `trainer.json` (counters) and, with a separate critic, `critic/`
(its trained weights). Nothing in it is pickled. The averages are also saved as a policy of their own beside it. Weights
that are not finite, or absurdly large, are never saved.

A learner whose weights are sharded over ranks writes them in parts (`sharded/`, see shards.py) instead of the files of
the trainer and the critic; its periodic checkpoints omit the policy, which would have to be gathered. Any number of
ranks can read either kind. All ranks call the store together; rank 0 writes all that is not sharded, and renames.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vlarl.config.run_checkpoints import PERIODIC
from vlarl.errors import UsageError, VlarlError
from vlarl.json_files import read_json, read_object
from vlarl.observability.files import disk_errors, full_disk
from vlarl.policies.base import Policy
from vlarl.policies.checksums import checksums, verify_checksums, write_checksums
from vlarl.policies.supervised import Saved
from vlarl.policies.tensor_file import write_tensors
from vlarl.training.fsdp import consolidated
from vlarl.training.learner import Learner
from vlarl.training.random_states import (
    Generator,
    Generators,
    default_generators,
    random_states,
    restore_random_states,
)
from vlarl.training.ranks import Ranks, SingleRank, on_each, on_first
from vlarl.training.retention import retire
from vlarl.training.shards import WEIGHTS, is_of_rank, is_sharded, stored_shapes, write_shards
from vlarl.training.state import TrainerState
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

COUNTERS = "trainer.json"
POLICY_NOTE = "metadata.json"
CRITIC_FOLDER, CRITIC_WEIGHTS = "critic", "trained.safetensors"
AVERAGE = "ema"  # checkpoint of the averages, and prefix of their tensors


class CheckpointStore:
    """The `checkpoints` folder of a run."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        ranks: Ranks = SingleRank(),  # noqa: B008 - it has no state
        generators: Generators = default_generators,
        max_total_gib: float | None = None,
    ) -> None:
        """The newest `keep` periodic checkpoints stay; fewer if all checkpoints take more than `max_total_gib`."""
        self.folder = folder
        self.keep = keep
        self.max_total_gib = max_total_gib
        self.ranks = ranks
        self.generators = generators
        on_first(ranks, self._recover)

    def save(self, name: str, learner: Learner, state: TrainerState) -> Path:
        """Write a checkpoint that training can resume from, and the average of the weights as a policy of its own."""
        refuse_diverged(learner.named_trained(), learner.config.optim.lr, self.folder, self.ranks)
        exported = not (learner.sharded and name.startswith(PERIODIC))
        tensors = trainer_tensors(learner) | random_states(self.generators(learner.device), self.ranks)

        def write_whole(folder: Path) -> None:
            if exported:
                learner.policy.save(folder)
            if not learner.sharded:
                _write_trainer(learner, tensors, folder)
            counters = asdict(state) | {
                "version": learner.version,
                "policy_updates": learner.policy_updates,
                "kl_coef": learner.kl.coef,
                "ema_updates": 0 if learner.average is None else learner.average.num_updates,
                "ptx_position": 0 if learner.ptx is None else learner.ptx.position,
            }
            (folder / COUNTERS).write_text(json.dumps(counters, indent=2))

        def write(folder: Path) -> None:
            if learner.sharded:
                write_shards(tensors | trained_tensors(learner.named_trained()), folder)
            with consolidated(learner.policy, self.ranks) if exported else nullcontext():
                on_first(self.ranks, lambda: write_whole(folder))

        # The average comes first: once the checkpoint exists, a run that is killed here counts as finished.
        if learner.average is not None and exported:
            counts = {"training_step": state.iteration, "policy_updates": learner.policy_updates}
            note = {"beta": learner.average.beta, "checkpoint": name, **counts}
            with learner.average.in_place():
                self.save_policy(AVERAGE, learner.policy, note)
        return self.write(name, write)

    def write(self, name: str, write: Callable[[Path], None]) -> Path:
        """Let all ranks write a checkpoint into a folder, which gets its name when it is complete; old ones retire."""
        path = self._replace(name, write)
        on_first(self.ranks, lambda: retire(self.folder, self.keep, self.max_total_gib))
        return path

    def policy_metadata(self, name: str) -> dict[str, Any]:
        """What `save_policy` has noted beside a policy; empty where there is none."""
        return read_object(self.folder / name / POLICY_NOTE)

    def save_policy(self, name: str, policy: Saved, metadata: dict[str, Any], dtype: torch.dtype | None = None) -> Path:
        """Write only the policy, with a note that describes it."""

        def write_whole(folder: Path) -> None:
            policy.save(folder, dtype)
            (folder / POLICY_NOTE).write_text(json.dumps(metadata, indent=2))

        def write(folder: Path) -> None:
            with consolidated(policy, self.ranks):
                on_first(self.ranks, lambda: write_whole(folder))

        return self._replace(name, write)

    def restore(self, learner: Learner, checkpoint: Path) -> TrainerState:
        """Restore a learner (whose policy was loaded from `policy_folder`) to the state of the checkpoint."""
        return restore(learner, checkpoint, self.generators)

    def latest(self) -> Path | None:
        """The newest checkpoint that training can resume from, None before the first."""
        found = [path for path in self.folder.iterdir() if (path / COUNTERS).is_file()]
        return max(found, key=lambda path: read_counters(path)["iteration"], default=None)

    def _replace(self, name: str, write: Callable[[Path], None]) -> Path:
        final, fresh, old = self.folder / name, self.folder / f".new-{name}", self.folder / f".old-{name}"

        def begin() -> None:
            self._settle(name)  # a failed save in this process may have left the old one renamed
            fresh.mkdir()

        def finish(listed: dict[str, list[int]]) -> None:
            write_checksums(fresh, listed)
            _sync(fresh)
            if final.exists():
                final.rename(old)
            fresh.rename(final)
            _sync_folder(self.folder)
            shutil.rmtree(old, ignore_errors=True)

        with disk_errors(final), _safetensors_errors(final):
            on_first(self.ranks, begin)
            write(fresh)
            parts = on_each(self.ranks, lambda: checksums(fresh, lambda name: is_of_rank(name, self.ranks)))
            listed = {name: checksum for part in parts for name, checksum in part.items()}
            on_first(self.ranks, lambda: finish(listed))
        return final

    def _recover(self) -> None:
        """Finish the saves that a crash interrupted, for every name with leftover files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        leftovers = [*self.folder.glob(".old-*"), *self.folder.glob(".new-*")]
        for name in {path.name[len(".old-") :] for path in leftovers}:
            self._settle(name)

    def _settle(self, name: str) -> None:
        """Remove the leftovers of an interrupted save; restore the old checkpoint if no new one replaced it."""
        final, fresh, old = self.folder / name, self.folder / f".new-{name}", self.folder / f".old-{name}"
        if old.exists() and not final.exists():
            old.rename(final)
        for leftover in (fresh, old):
            if leftover.exists():
                shutil.rmtree(leftover)


def trainer_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    """Optimizer state and averages by parameter name."""
    tensors = optimizer_tensors(learner.named_trained())
    if learner.average is not None:
        tensors |= {f"{AVERAGE}.{name}": average for name, average in learner.average.weights.items()}
    return tensors


def policy_folder(checkpoint: Path) -> Path | None:
    """The checkpoint, if it contains the policy; None: `restore` loads the trained weights into the policy that the run
    started from."""
    return checkpoint if (checkpoint / "config.json").is_file() else None


def _write_trainer(learner: Learner, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the state that one process keeps beside the policy."""
    if learner.critic is not None:
        (folder / CRITIC_FOLDER).mkdir()
        write_tensors(on_host(critic_weights(learner.critic)), folder / CRITIC_FOLDER / CRITIC_WEIGHTS)
    write_tensors(on_host(tensors), folder / TENSORS)


def critic_weights(critic: Policy) -> dict[str, torch.Tensor]:
    """The trained weights of a separate critic; the rest are the policy's."""
    return {name: parameter for name, parameter in critic.named_parameters() if parameter.requires_grad}


def restore(learner: Learner, folder: Path, generators: Generators = default_generators) -> TrainerState:
    """Restore a learner (whose policy was loaded from `policy_folder`) to the state of the checkpoint."""
    counters = read_counters(folder)
    own = generators(learner.device)
    try:
        _refuse_other_critic(learner, folder)
        verify(folder, learner.ranks)
        states, averaged = (_restore_shards if is_sharded(folder) else _restore_trainer)(learner, folder, own)
        learner.version = _count(counters.pop("version"), "version")
        learner.policy_updates = _count(counters.pop("policy_updates"), "policy_updates")
        ptx_position = _count(counters.pop("ptx_position", 0), "ptx_position")
        if learner.ptx is not None:
            learner.ptx.position = ptx_position
        kl_coef = counters.pop("kl_coef", None)
        if kl_coef is not None and math.isfinite(kl_coef):  # older versions could save a NaN: keep the configured one
            learner.kl.coef = kl_coef
        # Older checkpoints don't count the average's updates: it was updated at each optimizer step.
        ema_updates = _count(counters.pop("ema_updates", counters.get("optimizer_steps", 0)), "ema_updates")
        if learner.average is not None and averaged:
            learner.average.num_updates = ema_updates
        elif learner.average is not None:  # the run had no average so far
            learner.average.begin()
        learner.reference_at_start()
        restore_random_states(own, states, learner.ranks.rank, learner.config.run.seed)  # last: loading may sample
        return _state(counters)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UsageError(damaged(folder, error)) from error


def verify(folder: Path, ranks: Ranks) -> None:
    """Raise the same ValueError on all ranks if one of them finds that a file of its own has changed."""

    def find_damage() -> str:
        try:
            verify_checksums(folder, lambda name: (name == TENSORS or "/" in name) and is_of_rank(name, ranks))
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    if found := [damage for damage in on_each(ranks, find_damage) if damage]:
        raise ValueError(found[0])


Restored = tuple[dict[str, torch.Tensor], bool]
"""The random states of this rank by key, and whether the checkpoint has averages of the weights."""


def _restore_trainer(learner: Learner, folder: Path, own: Mapping[str, Generator]) -> Restored:
    tensors = load_file(folder / TENSORS)
    if learner.critic is not None:
        fill(critic_weights(learner.critic), load_file(folder / CRITIC_FOLDER / CRITIC_WEIGHTS))
    averages = with_prefix(tensors, AVERAGE)
    if learner.average is not None and averages:
        fill(learner.average.weights, averages)
    restore_optimizers(learner.named_trained(), tensors)
    return stored_states(own, learner.ranks.rank, tensors), bool(averages)


def _restore_shards(learner: Learner, folder: Path, own: Mapping[str, Generator]) -> Restored:
    averaged = bool(with_prefix(stored_shapes(folder), AVERAGE))
    more: dict[str, torch.Tensor] = {}
    if learner.average is not None and averaged:
        more = {f"{AVERAGE}.{name}": average for name, average in learner.average.weights.items()}
    states = restore_shards(learner.named_trained(), more, folder, own, learner.ranks)
    learner.policy.weights_changed()
    return states, averaged


def _refuse_other_critic(learner: Learner, folder: Path) -> None:
    there = (folder / CRITIC_FOLDER).is_dir()
    if is_sharded(folder):
        there = any(key.startswith(f"{WEIGHTS}.{CRITIC_FOLDER}.") for key in stored_shapes(folder))
    wanted, found = ("separate" if separate else "head" for separate in (learner.critic is not None, there))
    if wanted != found:
        raise UsageError(
            f"critic.kind = {wanted!r}: the checkpoint {folder} was written with {found!r}, and a run keeps its "
            f"critic: continue with critic.kind {found}, or start a new run from the checkpoint."
        )


def read_counters(folder: Path) -> dict[str, Any]:
    """The counters of a checkpoint; UsageError if they are damaged."""
    try:
        counters = read_json(folder / COUNTERS)
        return dict(counters, iteration=int(counters["iteration"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(damaged(folder, error)) from error


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} in {COUNTERS} is {str(value)[:40]!r}, which must be a whole number of 0 or more")
    return value


def _state(counters: dict[str, Any]) -> TrainerState:
    """The counters of a run; those of the wrong type are refused."""
    state = TrainerState(**counters)
    for name in ("iteration", "env_steps", "rollout_steps", "episodes", "optimizer_steps"):
        _count(getattr(state, name), name)
    for name in ("sampler", "open_episodes", "return_sums", "return_weights", "best_returns", "unfinished"):
        if not isinstance(getattr(state, name), dict):
            raise ValueError(f"{name} in {COUNTERS} is {str(getattr(state, name))[:40]!r}, which must be an object")
    for name in ("ema_return", "best_ema_return", "best_iteration"):
        value = getattr(state, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name} in {COUNTERS} is {str(value)[:40]!r}, which must be a number")
    return state


def damaged(folder: Path, error: Exception) -> str:
    """The message for a checkpoint that can't be resumed from."""
    reason = str(error) or type(error).__name__
    return f"the checkpoint {folder} is damaged ({reason}): move it away to resume from the one before it."


@contextmanager
def _safetensors_errors(path: Path) -> Iterator[None]:
    """Turn safetensors' own errors about a failing disk into ours."""
    try:
        yield
    except SafetensorError as error:
        if "os error 28" in str(error):  # as Rust writes ENOSPC
            raise VlarlError(full_disk(path)) from error
        raise VlarlError(f"cannot write {path}: {error}: check the disk, then continue with --resume") from error


def _sync(folder: Path) -> None:
    """Flush a folder and its content to disk: otherwise a power cut may keep a rename and lose the content."""
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
