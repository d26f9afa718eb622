"""Which checkpoint a name means. Wherever a checkpoint is wanted, a run may be named instead:

    my_run, runs/my_run                    its checkpoints/final, or its newest checkpoint if there is no final
    runs/my_run/checkpoints/step_000004    that checkpoint
    builtin:tiny-oft, org/name             what they say

Imports neither torch nor a simulator, so that what can be refused is refused at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.known import BUILTIN_DECODERS
from vlarl.config.paths import brief
from vlarl.config.problems import Problem, nearest, shown
from vlarl.config.schema import Config
from vlarl.config.training_data import local_folder, run_of
from vlarl.errors import UsageError

DEFAULT_ROOT = "runs"
FINAL, PERIODIC, COUNTERS = "final", "step_", "trainer.json"
POLICY_FILES = ("config.json", "adapter_config.json")
OPTIONS = (("policy", "path"), ("policy", "base"), ("lora", "adapter"))  # that name a checkpoint

ACCEPTED = (
    "a run's name or folder, a checkpoint folder, such as runs/<name>/checkpoints/final, a hub id, such as "
    "openvla/openvla-7b or openvla/openvla-7b@main, or one of "
    + ", ".join(f"builtin:{name}" for name in BUILTIN_DECODERS)
)
"""What is accepted wherever a checkpoint is wanted."""

OTHER_MODELS = (
    "act",
    "diffusion",
    "gr00t",
    "groot",
    "octo",
    "pi0",
    "pi05",
    "pi0fast",
    "rdt",
    "smolvla",
    "vqbet",
    "xvla",
)
"""Kinds of policies that are not read, as the names of their checkpoints begin."""

AnyConfig = TypeVar("AnyConfig", Config, FinetuneConfig)


@dataclass(frozen=True)
class Located:
    """A checkpoint, and how it was found."""

    path: str  # folder, built-in name or hub id
    note: str = ""  # which checkpoint was taken of a run; empty where a checkpoint was named


def list_runs(root: Path | str) -> list[str]:
    """Names of the runs under the root, newest first."""
    configs = sorted(Path(root).glob("*/config.yaml"), key=_time_written, reverse=True)
    return [path.parent.name for path in configs]


def _time_written(path: Path) -> float:
    """0 for a run that is deleted in the meantime, and for a link that leads nowhere."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def locate_checkpoint(name: str | Path, root: Path | str = DEFAULT_ROOT) -> Located:
    """The checkpoint that a name means: a run's, or what is named. UsageError for a run that has none."""
    return _of_a_run(str(name), root) or Located(str(name))


def refuse_unknown(name: str, root: Path | str = DEFAULT_ROOT) -> None:
    """Refuse a name that can be neither a checkpoint nor a run: no path, hub id or built-in name, and not there; and
    the hub id of another kind of policy."""
    if message := other_model(name):
        raise UsageError(f"{name}: {message}")
    if Path(name).name != name or ":" in name or local_folder(name) is not None:
        return
    runs = list_runs(Path(root).expanduser())
    match = nearest(name, runs)
    hint = f"Did you mean the run '{match}'? " if match else ""
    listed = f"Runs in {root}/, newest first: {_listed(runs)}. " if runs else f"{root}/ holds no runs. "
    raise UsageError(
        f"{name} is not a checkpoint: there is no folder or run of that name. {hint}{listed}Give {ACCEPTED}."
    )


def other_model(name: str) -> str | None:
    """What to say of a hub id that names another kind of policy; None where the name does not say so."""
    organisation, _, model = name.partition("/")
    kind = re.split(r"[-_.@]", model.lower())[0]
    if "/" in model or local_folder(name) is not None or (organisation != "lerobot" and kind not in OTHER_MODELS):
        return None
    said = f"model type {kind} is not supported" if kind in OTHER_MODELS else "policies of lerobot are not supported"
    return f"{said}; only OpenVLA and OpenVLA-OFT checkpoints are read, such as openvla/openvla-7b"


def check_models(config: Config | FinetuneConfig) -> Iterator[Problem]:
    """Checkpoints of another kind, where a configuration names one."""
    for section, field in OPTIONS:
        value = getattr(getattr(config, section), field, None)
        if value is not None and (message := other_model(value)):
            yield Problem(f"{section}.{field} = {shown(value)}", message, (f"{section}.{field}",))


def with_located(config: AnyConfig) -> AnyConfig:
    """The configuration with the checkpoint of a run wherever it names the run."""
    changed: dict[str, dict[str, str]] = {}
    for section, field in OPTIONS:
        value = getattr(getattr(config, section), field, None)
        if value is not None and (found := _of_a_run(value, config.run.root)):
            changed.setdefault(section, {})[field] = str(Path(found.path).absolute())
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changed.items()}
    return config.model_copy(update=sections)


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come, by its newest checkpoint."""

    iteration: int
    env_steps: int
    is_complete: bool  # false: the evaluation and the row of the last iteration are still to be made

    def is_finished(self, config: Config) -> bool:
        """Whether nothing is left to do under a configuration."""
        limit, budget = config.run.iterations, config.run.total_env_steps
        is_done = limit is not None and self.iteration >= limit
        is_spent = budget is not None and self.env_steps >= budget
        return self.is_complete and (is_done or is_spent)


def run_progress(run: Path, checkpoint: Path | None = None) -> RunProgress | None:
    """How far a run has come, by a checkpoint of it, by default the newest one that it can resume from; None: none."""
    folders = [checkpoint] if checkpoint is not None else (run / "checkpoints").glob("*")
    counters = [_counters(folder) for folder in folders if (folder / COUNTERS).is_file()]
    newest = max(counters, key=_iteration, default={})
    if _iteration(newest) < 0:
        return None
    return RunProgress(_iteration(newest), int(newest.get("env_steps") or 0), not newest.get("unfinished"))


def resumable_checkpoints(run: Path) -> dict[str, int]:
    """The checkpoints of a run that `--from` takes, sorted by name, with their iterations; -1: it can't be read."""
    folders = sorted(path.parent for path in (run / "checkpoints").glob(f"[!.]*/{COUNTERS}"))
    return {folder.name: _iteration(_counters(folder)) for folder in folders}


def resumed_checkpoint(name: str, root: Path | str = DEFAULT_ROOT) -> Path | None:
    """The folder of the checkpoint inside a run that `--resume` names; None where it names no checkpoint."""
    for folder in _candidates(name, root):
        if run_of(str(folder)) is None:
            continue
        if not (folder / COUNTERS).is_file():
            there = [path.name for path in sorted(folder.parent.glob("*")) if (path / COUNTERS).is_file()]
            others = f" Checkpoints that have it: {', '.join(there)}." if there else ""
            raise UsageError(
                f"{brief(folder)} cannot be resumed from: it holds a policy without the state of its training "
                f"({COUNTERS}).{others}"
            )
        return folder
    return None


def find_run_folder(name: str, root: Path | str = DEFAULT_ROOT) -> Path | None:
    """The folder of the run that a name or a path means; None where it means no run."""
    return next((folder for folder in _candidates(name, root) if _is_run(folder)), None)


def _candidates(name: str, root: Path | str) -> tuple[Path, Path]:
    return Path(name).expanduser(), Path(root).expanduser() / name


def _of_a_run(name: str, root: Path | str) -> Located | None:
    """The checkpoint of the run that a name means; None where it means no run and no checkpoint below the root."""
    if run := find_run_folder(name, root):
        return _newest(run)
    below = Path(root).expanduser() / name
    is_below = local_folder(name) is None and run_of(str(below)) is not None
    return Located(str(below)) if is_below else None


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and not _holds_policy(folder)


def _holds_policy(folder: Path) -> bool:
    return any((folder / file).is_file() for file in POLICY_FILES)


def _newest(run: Path) -> Located:
    checkpoints, shown = run / "checkpoints", brief(run)
    periodic = sorted(checkpoints.glob(f"{PERIODIC}*"), key=lambda path: _iteration(_counters(path)))
    usable = [path for path in periodic if _holds_policy(path)]
    final = checkpoints / FINAL
    if _holds_policy(final):
        own = _iteration(_counters(final)) if (final / COUNTERS).is_file() else None
        newer = [path for path in usable[-1:] if own is not None and _iteration(_counters(path)) > own]
        more = f" ({newer[0].name} is newer: name {brief(newer[0])} to take it)" if newer else ""
        return Located(str(final), f"{shown}: its checkpoints/final is taken{more}")
    if usable:
        newest = usable[-1]
        return Located(str(newest), f"{shown}: it has no checkpoints/final, so its newest, {newest.name}, is taken")
    if periodic:
        raise UsageError(
            f"the run {shown} holds no whole policy yet: its checkpoints are written in parts, by rank, and the whole "
            f"policy is written when the run finishes. Finish it with `vlarl train --resume {shown}`."
        )
    raise UsageError(
        f"the run {shown} has no checkpoint yet: `vlarl status {shown}` says how it goes, and "
        f"`vlarl train --resume {shown}` resumes it."
    )


def _counters(checkpoint: Path) -> dict[str, Any]:
    """What trainer.json says; empty where it can't be read, which resuming from it will say."""
    try:
        counters = json.loads((checkpoint / COUNTERS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return counters if isinstance(counters, dict) else {}


def _iteration(counters: dict[str, Any]) -> int:
    value = counters.get("iteration")
    return value if isinstance(value, int) else -1


def _listed(names: Iterable[str], limit: int = 12) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
