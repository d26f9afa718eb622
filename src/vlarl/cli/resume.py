"""Checks of `vlarl train --resume` before anything is loaded: the configuration is complete, the checkpoint exists."""

from __future__ import annotations

from pathlib import Path

from vlarl.config.problems import nearest, shown
from vlarl.config.run_checkpoints import resumable_checkpoints
from vlarl.config.schema import Config
from vlarl.config.source.yaml_file import read_document
from vlarl.errors import UsageError
from vlarl.observability.run_dir import END_OF_CONFIG

REMEDY = (
    "restore it from a copy, or start a new run from a checkpoint of this one with --policy.path "
    "{run}/checkpoints/<name>"
)


def refuse_damaged(file: Path) -> None:
    """Refuse a configuration that is truncated or not a run's: missing options would silently get their defaults."""
    try:
        text = file.read_text(encoding="utf-8")
        sections = read_document(file).data if text.strip() else {}
    except (UsageError, UnicodeDecodeError, OSError) as error:
        raise _refused(file, f"it can't be read ({' '.join(str(error).split())})") from error
    if foreign := [name for name in sections if name not in Config.model_fields]:
        raise _refused(file, f"it is not the configuration of a run of `vlarl train`: it has {shown(foreign[0])}")
    if text.rstrip().endswith(END_OF_CONFIG):
        return
    *_, last = Config.model_fields  # earlier versions wrote no last line: all options must be there
    missing = [name for name in Config.model_fields if name not in sections]
    if not missing:
        content = sections[last]
        found = content if isinstance(content, dict) else {}  # None: the file ends at the section's own line
        missing = [f"{last}.{name}" for name in type(getattr(Config(), last)).model_fields if name not in found]
    if missing:
        raise _refused(file, f"it is truncated: {missing[0]} is missing")


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
