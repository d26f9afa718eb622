"""Resolves names of checkpoints. Wherever a checkpoint is expected, a run may be named instead:

    my_run, runs/my_run                    its checkpoints/final, or its newest checkpoint if there is no final
    runs/my_run/checkpoints/step_000004    that checkpoint; my_run/step_000004 for short
    builtin:tiny-oft, org/name             a built-in policy, a model on the hub

Imports neither torch nor a simulator, so that wrong names are refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.known import BUILTINS, FRESH_NAMES, is_known_flow
from vlarl.config.paths import brief, expanded
from vlarl.config.problems import Problem, nearest, shown, unknown
from vlarl.config.resume_command import resume_command
from vlarl.config.schema import Config
from vlarl.config.source.presets import presets_of
from vlarl.config.training_data import local_folder, run_of
from vlarl.errors import UsageError
from vlarl.json_files import read_object

DEFAULT_ROOT = "runs"
CHECKPOINTS, FINAL, PERIODIC, COUNTERS = "checkpoints", "final", "step_", "trainer.json"
ADAPTER, TRAINER_WEIGHTS = "adapter_config.json", "trainer.safetensors"
POLICY_FILES = ("config.json", ADAPTER)
SMALL_BYTES = 1 << 30  # of weights: a model that is trained whole, in float32, on a small machine
OPTIONS = (("policy", "path"), ("policy", "base"), ("lora", "adapter"))  # that name a checkpoint
REWARD_MODEL = ("reward", "model")  # names one, or a model of another kind

HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\S+))?", re.ASCII)
"""`organisation/name`, and `@revision` (a branch, a tag or a commit) if it is not the main branch."""

ACCEPTED = (
    "a run's name or folder, a checkpoint folder, such as runs/<name>/checkpoints/final, a hub id, such as "
    "openvla/openvla-7b or openvla/openvla-7b@main, or one of " + ", ".join(f"builtin:{name}" for name in BUILTINS)
)
"""What is accepted wherever a checkpoint is expected."""

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
    "vqbet",
    "xvla",
)
"""Kinds of policies that are not supported, as prefixes of the names of their checkpoints."""

AnyConfig = TypeVar("AnyConfig", Config, FinetuneConfig)


@dataclass(frozen=True)
class LocatedCheckpoint:
    """A checkpoint, and how it was found."""

    path: str  # folder, built-in name or hub id
    note: str = ""  # which checkpoint of a run was chosen; empty if a checkpoint was named


def list_runs(root: Path | str) -> list[str]:
    """Names of the runs under the root, newest first."""
    configs = sorted(Path(root).glob("*/config.yaml"), key=_time_written, reverse=True)
    return [path.parent.name for path in configs]


def _time_written(path: Path) -> float:
    """0 for a run that is deleted in the meantime, and for a broken link."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def locate_checkpoint(name: str | Path, root: Path | str = DEFAULT_ROOT) -> LocatedCheckpoint:
    """The checkpoint that a name refers to: that of a run, or the one that is named. UsageError for a run without a
    checkpoint and for a misspelt built-in policy."""
    if found := _of_a_run(str(name), root):
        return found
    if message := misspelt_builtin(str(name)):
        raise UsageError(f"{name}: {message}")
    return LocatedCheckpoint(str(name))


def misspelt_builtin(name: str) -> str | None:
    """The message for a misspelt name of a built-in policy; None for all other names, and if it is a folder."""
    kind, has_kind, size = name.partition(":")
    if has_kind:
        known = [f"{kind}:{size}" for size in (FRESH_NAMES if kind == "init" else BUILTINS)]
        return unknown("built-in policy", name, known) if kind in ("builtin", "init") and name not in known else None
    is_path = "/" in name or local_folder(name) is not None
    match = None if is_path else nearest(name.lower().replace("_", "-"), BUILTINS, cutoff=0.65)
    return f"no folder or run of that name; did you mean builtin:{match}?" if match else None


def as_hub_id(name: str) -> re.Match[str] | None:
    """The parts of a hub id; None for any other name. If its first part is a folder on this machine, it is taken for a
    misspelt path, unless it names a revision."""
    hub_id = HUB_ID.fullmatch(name)
    if hub_id is None or expanded(name).is_dir():
        return None
    return hub_id if hub_id["revision"] is not None or not Path(name).parent.is_dir() else None


def refuse_unknown(name: str, root: Path | str = DEFAULT_ROOT) -> None:
    """Refuse a name that is neither on this machine nor a hub id, and suggest the run or checkpoint that may be meant;
    also refuse the hub id of another kind of policy."""
    if message := other_model(name):
        raise UsageError(f"{name}: {message}")
    if ":" in name or local_folder(name) is not None or as_hub_id(name):
        return
    for folder in _candidates(name, root):
        _refuse_misnamed(folder, POLICY_FILES)
    subject = f"{name} is not a checkpoint: there is no folder or run of that name."
    path = Path(name)
    run = path.parent.parent if path.parent.name == CHECKPOINTS else path
    if run != path and run.name in presets_of(FinetuneConfig):
        command = f"vlarl finetune {run.name} --run.name {run.name}"
        raise UsageError(f"{subject} It is what the preset {run.name} makes; run: {command}")
    place = run.parent if len(run.parts) > 1 and run.parent.is_dir() else root
    runs = [name for name in list_runs(expanded(place)) if _has_checkpoint(expanded(place) / name)]
    where = f"{brief(place)}/".replace("//", "/")
    listed = f"Runs with a checkpoint in {where}, newest first: {_listed(runs)}."
    if match := nearest(run.name, runs):
        raise UsageError(f"{subject} Did you mean the run '{match}'? {listed}")
    raise UsageError(f"{subject} {listed if runs else f'{where} holds no runs with a checkpoint.'} Give {ACCEPTED}.")


def checkpoint_here(name: str, root: Path | str = DEFAULT_ROOT) -> Path | None:
    """The folder of a checkpoint on this machine; None for a hub id. UsageError if it is neither."""
    if (folder := local_folder(name)) is not None:
        return holding_policy(name, folder)
    refuse_unknown(name, root)
    if as_hub_id(name) is None:
        raise UsageError(f"{name} is not a checkpoint: there is no such folder. Give {ACCEPTED}.")
    return None


def holding_policy(name: str, folder: Path) -> Path:
    """The folder, if it holds a policy; else UsageError."""
    if not _holds_policy(folder):
        raise UsageError(f"{name} is not a checkpoint: it holds no config.json. Give {ACCEPTED}.")
    return folder


def is_small_checkpoint(name: str, root: Path | str = DEFAULT_ROOT) -> bool:
    """Whether a checkpoint is a small model, by the size of its weights or of those of the base under an adapter.

    A SmolVLA of real size is small, too. Any other model on the hub counts as large; a name that is not a checkpoint,
    which is refused later, counts as small.
    """
    if name.partition(":")[0] in ("builtin", "init"):
        return True
    found = _of_a_run(name, root)
    folder = local_folder(name if found is None else found.path)
    if folder is not None and (folder / ADAPTER).is_file():
        base = read_object(folder / ADAPTER).get("base_model_name_or_path")
        if not isinstance(base, str) or Path(base, ADAPTER).is_file():  # an adapter on an adapter can't be loaded
            return False
        name, folder = base, local_folder(base)
    if is_flow(name if folder is None else str(folder)):
        return True
    if folder is None:
        return as_hub_id(name) is None
    weights = [path for suffix in ("safetensors", "bin") for path in folder.glob(f"*.{suffix}")]
    return sum(path.stat().st_size for path in weights if path.is_file() and path.name != TRAINER_WEIGHTS) < SMALL_BYTES


def is_flow(name: str) -> bool | None:
    """Whether a checkpoint is a flow policy: by its config.json, or by its name on the hub. None: that is not known
    before a download."""
    if name.startswith(("builtin:", "init:")):
        return is_known_flow(name)
    folder = local_folder(name)
    if folder is None:
        return True if as_hub_id(name) and "smolvla" in _model_words(name) else None
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        return None
    return read_object(folder / "config.json").get("type") == "smolvla"


def _model_words(hub_id: str) -> list[str]:
    """The words of a model's name, without its organisation."""
    return re.split(r"[-_.@]", hub_id.lower().partition("/")[2])


def other_model(name: str) -> str | None:
    """The message for a hub id that names another kind of policy; None for any other name."""
    organisation, _, model = name.partition("/")
    kind = _model_words(name)[0]
    if "/" in model or local_folder(name) is not None or (organisation != "lerobot" and kind not in OTHER_MODELS):
        return None
    if kind == "smolvla":
        return None
    reason = f"model type {kind} is not supported" if kind in OTHER_MODELS else "policies of lerobot are not supported"
    supported = (
        "OpenVLA and OpenVLA-OFT, such as openvla/openvla-7b, lerobot's SmolVLA, and for prompts the language models "
        "of transformers"
    )
    return f"{reason}; {supported} are"


def check_models(config: Config | FinetuneConfig) -> Iterator[Problem]:
    """A problem for each checkpoint of another kind that a configuration names."""
    for section, field in OPTIONS:
        value = getattr(getattr(config, section), field, None)
        if value is not None and (message := other_model(value)):
            yield Problem(f"{section}.{field} = {shown(value)}", message, (f"{section}.{field}",))


def with_located(config: AnyConfig) -> AnyConfig:
    """The configuration with each run that it names as a checkpoint replaced by the run's checkpoint."""
    changed: dict[str, dict[str, Any]] = {}
    for section, field in (*OPTIONS, REWARD_MODEL):
        value = getattr(getattr(config, section), field, None)
        if value is not None and (found := _of_a_run(value, config.run.root)):
            changed.setdefault(section, {})[field] = str(Path(found.path).absolute())
    if isinstance(config, Config):
        found_models = {name: _of_a_run(model, config.run.root) for name, model in config.reward.models.items()}
        named = {name: str(Path(found.path).absolute()) for name, found in found_models.items() if found}
        if named:
            changed.setdefault("reward", {})["models"] = config.reward.models | named
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changed.items()}
    return config.model_copy(update=sections)


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run, by its newest checkpoint."""

    iteration: int
    env_steps: int
    is_complete: bool  # false: the evaluation and the metrics row of the last iteration are still missing
    validations_since_best: int = 0  # of a supervised run

    def is_finished(self, config: Config) -> bool:
        """Whether nothing is left to do under a configuration."""
        limit, budget = config.run.iterations, config.run.total_env_steps
        is_done = limit is not None and self.iteration >= limit
        is_spent = budget is not None and self.env_steps >= budget
        return self.is_complete and (is_done or is_spent)


def run_progress(run: Path, checkpoint: Path | None = None) -> RunProgress | None:
    """The progress of a run at a checkpoint, by default the newest that it can resume from; None: there is none."""
    folders = [checkpoint] if checkpoint is not None else (run / "checkpoints").glob("*")
    counters = [_counters(folder) for folder in folders if (folder / COUNTERS).is_file()]
    newest = max(counters, key=_iteration, default={})
    if _iteration(newest) < 0:
        return None
    steps, validations = (
        count if isinstance(count := newest.get(name), int) else 0 for name in ("env_steps", "validations_since_best")
    )
    return RunProgress(_iteration(newest), steps, not newest.get("unfinished"), validations)


def resumable_checkpoints(run: Path) -> dict[str, int]:
    """The checkpoints of a run that `--from` accepts, sorted by name, with their iterations; -1: can't be read."""
    folders = sorted(path.parent for path in (run / "checkpoints").glob(f"[!.]*/{COUNTERS}"))
    return {folder.name: _iteration(_counters(folder)) for folder in folders}


def resumed_checkpoint(name: str, root: Path | str = DEFAULT_ROOT) -> Path | None:
    """The folder of the checkpoint inside a run that `--resume` names; None if it names no checkpoint."""
    for folder in _candidates(name, root):
        _refuse_misnamed(folder, (COUNTERS,))
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
    """The folder of the run that a name or a path refers to; None if there is no such run."""
    return next((folder for folder in _candidates(name, root) if _is_run(folder)), None)


def _candidates(name: str, root: Path | str) -> tuple[Path, Path]:
    return Path(name).expanduser(), Path(root).expanduser() / name


def _refuse_misnamed(folder: Path, files: Sequence[str]) -> None:
    """Refuse a checkpoint that its run does not have, and list those that it has: folders with one of the files."""
    run = folder.parent.parent
    if folder.is_dir() or folder.parent.name != CHECKPOINTS or not _is_run(run):
        return
    found = sorted(path for path in folder.parent.glob("[!.]*") if any((path / file).is_file() for file in files))
    there = [path.name for path in found]
    match = nearest(folder.name, there)
    hint = f"did you mean {match}? " if match else ""
    listed = f"It has {', '.join(there)}." if there else f"`vlarl status {brief(run)}` shows its progress."
    raise UsageError(f"the run {brief(run)} has no checkpoint {folder.name}: {hint}{listed}")


def _has_checkpoint(run: Path) -> bool:
    return any(path.is_dir() for path in (run / CHECKPOINTS).glob("[!.]*"))


def _of_a_run(name: str, root: Path | str) -> LocatedCheckpoint | None:
    """The checkpoint of the run that a name refers to; None if it names neither a run nor a checkpoint below the root.

    A run and the name of a checkpoint, `my_run/final`, look like a hub id, and count as one if the run has no similar
    checkpoint: an organisation may have the same name as a run.
    """
    parent, _, last = name.rstrip("/").rpartition("/")
    run = find_run_folder(parent if last == CHECKPOINTS else name, root)
    if run is not None:
        return _newest(run)
    if local_folder(name) is None and parent and (run := find_run_folder(parent, root)):
        there = [path.name for path in (run / CHECKPOINTS).glob("[!.]*") if _holds_policy(path)]
        if last in there:
            return LocatedCheckpoint(str(run / CHECKPOINTS / last))
        if nearest(last, there):
            _refuse_misnamed(run / CHECKPOINTS / last, POLICY_FILES)
    below = Path(root).expanduser() / name
    is_below = local_folder(name) is None and run_of(str(below)) is not None
    return LocatedCheckpoint(str(below)) if is_below else None


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and not _holds_policy(folder)


def _holds_policy(folder: Path) -> bool:
    return any((folder / file).is_file() for file in POLICY_FILES)


def _newest(run: Path) -> LocatedCheckpoint:
    checkpoints, shown = run / CHECKPOINTS, brief(run)
    periodic = sorted(checkpoints.glob(f"{PERIODIC}*"), key=lambda path: _iteration(_counters(path)))
    usable = [path for path in periodic if _holds_policy(path)]
    final = checkpoints / FINAL
    if _holds_policy(final):
        own = _iteration(_counters(final)) if (final / COUNTERS).is_file() else None
        newer = [path for path in usable[-1:] if own is not None and _iteration(_counters(path)) > own]
        more = f" ({newer[0].name} is newer: name {brief(newer[0])} to take it)" if newer else ""
        return LocatedCheckpoint(str(final), f"{shown}: its checkpoints/final is taken{more}")
    if usable:
        newest = usable[-1]
        return LocatedCheckpoint(
            str(newest), f"{shown}: it has no checkpoints/final, so its newest, {newest.name}, is taken"
        )
    if periodic:
        raise UsageError(
            f"the run {shown} holds no whole policy yet: its checkpoints are written in parts, by rank, and the whole "
            f"policy is written when the run finishes. Finish it with `{resume_command(run)}`."
        )
    raise UsageError(
        f"the run {shown} has no checkpoint yet: `vlarl status {shown}` shows its progress. If it has stopped, "
        f"`{resume_command(run)}` resumes it."
    )


def _counters(checkpoint: Path) -> dict[str, Any]:
    """The content of trainer.json; empty if it can't be read, which resuming from it reports."""
    return read_object(checkpoint / COUNTERS)


def _iteration(counters: dict[str, Any]) -> int:
    value = counters.get("iteration")
    return value if isinstance(value, int) else -1


def _listed(names: Iterable[str], limit: int = 12) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
