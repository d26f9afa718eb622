"""Checkpoints: written to a temporary folder, synced, then renamed, so that a crash leaves the old one whole.

A checkpoint is the policy in its original layout (usable by itself) plus `trainer.safetensors` (moments of the
optimizers, averages of the weights, state of torch's random numbers), `trainer.json` (counters) and, with a separate
critic, `critic/` (what is trained of it). Nothing in it is pickled. The averages are a policy of their own beside it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vlarl.errors import UsageError, VlarlError
from vlarl.observability.files import disk_errors
from vlarl.policies.base import Policy
from vlarl.training.learner import Learner

TENSORS, COUNTERS = "trainer.safetensors", "trainer.json"
CRITIC_FOLDER, CRITIC_WEIGHTS = "critic", "trained.safetensors"
AVERAGE = "ema"  # checkpoint of the averages, and prefix of their tensors


@dataclass
class TrainerState:
    """What a run needs beside weights and moments to go on as if it had never stopped."""

    iteration: int = 0
    env_steps: int = 0
    episodes: int = 0
    optimizer_steps: int = 0
    ema_return: float | None = None
    best_ema_return: float | None = None
    best_iteration: int | None = None
    sampler: dict[str, Any] = field(default_factory=dict)  # what the task sampler goes on from


class BestReturn:
    """Notices when the moving average of episodic returns has risen enough to keep the policy."""

    def __init__(self, alpha: float, min_delta: float, patience: int) -> None:
        self.alpha = alpha
        self.min_delta = min_delta
        self.patience = patience

    def improved(self, state: TrainerState, returns: Sequence[float], iteration: int) -> bool:
        """Take an iteration's returns into the average, episode by episode; True when its policy should be kept."""
        for value in returns:
            before = value if state.ema_return is None else state.ema_return
            state.ema_return = self.alpha * before + (1 - self.alpha) * value
        if not returns or state.ema_return is None:
            return False
        if state.best_iteration is not None and iteration - state.best_iteration <= self.patience:
            return False
        if state.best_ema_return is not None and state.ema_return <= state.best_ema_return + self.min_delta:
            return False
        state.best_ema_return, state.best_iteration = state.ema_return, iteration
        return True


class CheckpointStore:
    """The `checkpoints` folder of a run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        folder.mkdir(parents=True, exist_ok=True)
        self._recover()

    def save(self, name: str, learner: Learner, state: TrainerState) -> Path:
        """Write a checkpoint that training can go on from, and the average of the weights as a policy of its own."""

        def write(folder: Path) -> None:
            learner.policy.save(folder)
            if learner.critic is not None:
                (folder / CRITIC_FOLDER).mkdir()
                save_file(_on_host(critic_weights(learner.critic)), folder / CRITIC_FOLDER / CRITIC_WEIGHTS)
            save_file(_on_host(trainer_tensors(learner)), folder / TENSORS)
            counters = asdict(state) | {
                "version": learner.version,
                "policy_updates": learner.policy_updates,
                "kl_coef": learner.kl.coef,
            }
            (folder / COUNTERS).write_text(json.dumps(counters, indent=2))

        path = self._replace(name, write)
        self._retire()
        if learner.average is not None:
            note = {"beta": learner.average.beta, "checkpoint": name}
            with learner.average.in_place():
                self.save_policy(AVERAGE, learner.policy, note | {"training_step": state.iteration})
        return path

    def save_policy(
        self, name: str, policy: Policy, metadata: dict[str, Any], dtype: torch.dtype | None = None
    ) -> Path:
        """Write the policy alone, with a note of what it is."""

        def write(folder: Path) -> None:
            policy.save(folder, dtype)
            (folder / "metadata.json").write_text(json.dumps(metadata, indent=2))

        return self._replace(name, write)

    def latest(self) -> Path | None:
        """The newest checkpoint that training can go on from, None before the first."""
        found = [path for path in self.folder.iterdir() if (path / COUNTERS).is_file()]
        return max(found, key=lambda path: _read_counters(path)["iteration"], default=None)

    def _replace(self, name: str, write: Callable[[Path], None]) -> Path:
        final, fresh, old = self.folder / name, self.folder / f".new-{name}", self.folder / f".old-{name}"
        with disk_errors(final), _safetensors_errors(final):
            for leftover in (fresh, old):
                shutil.rmtree(leftover, ignore_errors=True)
            fresh.mkdir()
            write(fresh)
            _sync(fresh)
            if final.exists():
                final.rename(old)
            fresh.rename(final)
            _sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return final

    def _recover(self) -> None:
        """Finish what a crash interrupted: put an old checkpoint back when no new one took its place."""
        for old in self.folder.glob(".old-*"):
            final = self.folder / old.name.removeprefix(".old-")
            if final.exists():
                shutil.rmtree(old)
            else:
                old.rename(final)
        for fresh in self.folder.glob(".new-*"):
            shutil.rmtree(fresh)

    def _retire(self) -> None:
        """Keep the newest periodic checkpoints only."""
        periodic = sorted(self.folder.glob("step_*"))
        for path in periodic[: -self.keep]:
            shutil.rmtree(path)


def trainer_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    """Moments of the optimizers and averages by parameter name, and the state of torch's random numbers."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    for name, parameter, optimizer in learner.named_trained():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    if learner.average is not None:
        tensors |= {f"{AVERAGE}.{name}": average for name, average in learner.average.weights.items()}
    return tensors


def critic_weights(critic: Policy) -> dict[str, torch.Tensor]:
    """What is trained of a separate critic; the rest is the policy's."""
    return {name: parameter for name, parameter in critic.named_parameters() if parameter.requires_grad}


def _on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def restore(learner: Learner, folder: Path) -> TrainerState:
    """Put a learner (whose policy was loaded from the same folder) back where the checkpoint was written."""
    counters = _read_counters(folder)
    _refuse_other_critic(learner, folder)
    try:
        tensors = load_file(folder / TENSORS)
        torch.set_rng_state(tensors.pop("rng.cpu"))
        if learner.critic is not None:
            _fill(critic_weights(learner.critic), load_file(folder / CRITIC_FOLDER / CRITIC_WEIGHTS))
        averages = _with_prefix(tensors, AVERAGE)
        if learner.average is not None and averages:  # none: the run kept no average so far, and begins one here
            _fill(learner.average.weights, averages)
        _restore_moments(learner, _with_prefix(tensors, "optimizer"))
        learner.version = counters.pop("version")
        learner.policy_updates = counters.pop("policy_updates")
        learner.kl.coef = counters.pop("kl_coef", learner.kl.coef)
        learner.reference_at_start()
        return TrainerState(**counters)
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise UsageError(_damaged(folder, error)) from error


def _refuse_other_critic(learner: Learner, folder: Path) -> None:
    kinds = (
        "separate" if there else "head" for there in (learner.critic is not None, (folder / CRITIC_FOLDER).is_dir())
    )
    wanted, found = kinds
    if wanted != found:
        raise UsageError(
            f"critic.kind = {wanted!r}: the checkpoint {folder} was written with {found!r}, and a run keeps its "
            f"critic: go on with critic.kind {found}, or start a new run from the checkpoint."
        )


def _restore_moments(learner: Learner, moments: dict[str, torch.Tensor]) -> None:
    trained = {name: (parameter, optimizer) for name, parameter, optimizer in learner.named_trained()}
    for full_name, tensor in moments.items():
        name, _, key = full_name.rpartition(".")
        parameter, optimizer = trained[name]
        optimizer.state[parameter][key] = tensor.to(parameter.device)


@torch.no_grad()
def _fill(own: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    for name, tensor in own.items():
        tensor.copy_(stored[name])


def _with_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(f"{prefix}."): tensor for n, tensor in tensors.items() if n.startswith(f"{prefix}.")}


def _read_counters(folder: Path) -> dict[str, Any]:
    try:
        counters = json.loads((folder / COUNTERS).read_text(encoding="utf-8"))
        return dict(counters, iteration=int(counters["iteration"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(_damaged(folder, error)) from error


def _damaged(folder: Path, error: Exception) -> str:
    reason = str(error) or type(error).__name__
    return f"the checkpoint {folder} is damaged ({reason}): move it away to go on from the one before it."


@contextmanager
def _safetensors_errors(path: Path) -> Iterator[None]:
    """safetensors reports a disk that failed it as an error of its own."""
    try:
        yield
    except SafetensorError as error:
        raise VlarlError(f"cannot write {path}: {error}: free some space, then go on with --resume") from error


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
