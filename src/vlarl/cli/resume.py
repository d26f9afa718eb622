"""Checks of `--resume` before anything is loaded: the configuration is complete, the checkpoint exists."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.paths import brief
from vlarl.config.problems import nearest, shown
from vlarl.config.resume_command import resume_command
from vlarl.config.run_checkpoints import CHECKPOINTS, FINAL, resumable_checkpoints, run_progress
from vlarl.config.schema import Config
from vlarl.config.source.load import COMMANDS
from vlarl.config.source.yaml_file import read_document
from vlarl.config.words import counted
from vlarl.errors import UsageError
from vlarl.observability.run_dir import END_OF_CONFIG

REMEDY = (
    "restore it from a copy, or start a new run from a checkpoint of this one with --policy.path "
    "{run}/checkpoints/<name>"
)


def refuse_damaged(file: Path, schema: type[Config] | type[FinetuneConfig] = Config) -> None:
    """Refuse a configuration that is truncated or not a run's: missing options would silently get their defaults."""
    try:
        text = file.read_text(encoding="utf-8")
        sections = read_document(file).data if text.strip() else {}
    except (UsageError, UnicodeDecodeError, OSError) as error:
        raise _refused(file, f"it can't be read ({' '.join(str(error).split())})") from error
    if foreign := [name for name in sections if name not in schema.model_fields]:
        command = next(name for name, known in COMMANDS.items() if known is schema)
        others = {name: set(known.model_fields) for name, known in COMMANDS.items() if known is not schema}
        if other := next((name for name, fields in others.items() if set(sections) <= fields), None):
            raise UsageError(
                f"{brief(file.parent)} is a run of `vlarl {other}`: resume it with `vlarl {other} --resume "
                f"{shlex.quote(brief(file.parent))}`"
            )
        raise _refused(file, f"it is not the configuration of a run of `vlarl {command}`: it has {shown(foreign[0])}")
    if text.rstrip().endswith(END_OF_CONFIG):
        return
    *_, last = schema.model_fields  # earlier versions wrote no last line: all options must be there
    missing = [name for name in schema.model_fields if name not in sections]
    if not missing:
        content = sections[last]
        found = content if isinstance(content, dict) else {}  # None: the file ends at the section's own line
        missing = [f"{last}.{name}" for name in type(getattr(schema(), last)).model_fields if name not in found]
    if missing:
        raise _refused(file, f"it is truncated: {missing[0]} is missing")


def nothing_left_to_imitate(
    run: Path, checkpoint: Path | None, config: FinetuneConfig, flags: Sequence[str]
) -> str | None:
    """The message for a supervised run that has finished; None where steps are left. UsageError if flags were given, as
    they would have no effect, and for a run that left nothing to resume from."""
    progress, shown_run = run_progress(run, checkpoint), brief(run)
    is_exported = (run / CHECKPOINTS / FINAL).is_dir()
    if progress is None and is_exported:
        raise UsageError(
            f"the run {shown_run} has its final policy and no checkpoint to resume from: start a new run from its "
            f"weights with --policy.path {shlex.quote(shown_run)}"
        )
    if progress is None or not is_exported:
        return None
    done, patience = counted(progress.iteration, "step"), config.validation.patience
    if progress.iteration >= config.optim.steps:
        state = f"the run {shown_run} has done {done} of optim.steps = {config.optim.steps}"
        longer = resume_command(run, {"optim.steps": 2 * config.optim.steps})
    elif patience is not None and progress.validations_since_best >= patience:
        state = f"the run {shown_run} was stopped after {done}, by validation.patience = {patience}"
        longer = resume_command(run, {"validation.patience": 2 * patience})
    else:
        return None
    if flags:
        raise UsageError(
            f"{state}: nothing is left to do, so {', '.join(flags)} would have no effect, and nothing was changed. To "
            f"train longer: {longer}"
        )
    return f"{state}: it is finished. To train longer: {longer}"


def named_checkpoint(run: Path, name: str) -> Path:
    """The checkpoint of a run that `--from` names; UsageError lists the existing ones."""
    folder = run / "checkpoints"
    found = list(resumable_checkpoints(run))
    if name in found:
        return folder / name
    match = nearest(name, found)
    hint = f"did you mean {match}? " if match else ""
    there = f"there {'is' if len(found) == 1 else 'are'} {', '.join(found)}" if found else "none was saved yet"
    raise UsageError(f"--from {name}: {folder} has no checkpoint of that name to resume from; {hint}{there}")


def _refused(file: Path, what: str) -> UsageError:
    return UsageError(f"{file} is damaged: {what}; {REMEDY.format(run=file.parent)}")
