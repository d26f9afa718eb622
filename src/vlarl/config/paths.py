"""Paths of a configuration: made absolute when it is loaded (`~` is expanded), so that a saved configuration means the
same in every working directory; printed relative to the working directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from vlarl.config.known import EXPERTS
from vlarl.config.schema import Section

AnyConfig = TypeVar("AnyConfig", bound=Section)  # Config or FinetuneConfig

PATHS = (
    *("run.root", "env.assets", "curriculum.start_from", "demos.path", "prompts.path", "prompts.eval_path"),
    "reward.path",
)
"""Options that are always a path, or a list of paths."""

FOLDERS_OR_NAMES = ("policy.path", "policy.base", "lora.adapter", "reward.model", "reward.models")
"""Options that are a folder if it exists, or have such values; else the name of a built-in policy or of a model on the
hub."""

IMITATED = "ptx.path"
"""A path, unless it names the scripted experts."""


FILES_OR_NAMES = ("demos.mapping",)
"""Options that are a file if they end like one, or a name."""


def located(config: AnyConfig) -> AnyConfig:
    """The configuration with all its paths absolute."""
    config = _changed(config, PATHS, absolute)
    config = _changed(config, FILES_OR_NAMES, lambda text: absolute(text) if Path(text).suffix else text)
    config = _changed(config, (IMITATED,), lambda text: text if text == EXPERTS else absolute(text))
    return _changed(config, FOLDERS_OR_NAMES, lambda text: absolute(text) if _is_local(text) else text)


def briefly(config: AnyConfig) -> AnyConfig:
    """The configuration with its paths shortened for printing."""
    return _changed(config, (*PATHS, *FOLDERS_OR_NAMES, *FILES_OR_NAMES, IMITATED), brief)


def absolute(path: str | Path) -> str:
    """The absolute path with `~` expanded; `..` is resolved if the result is the same file."""
    full = os.path.join(os.getcwd(), expanded(path))
    short = os.path.normpath(full)
    return short if os.path.realpath(short) == os.path.realpath(full) else full


def expanded(path: str | Path) -> Path:
    """A path with `~` expanded, if there is a home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def brief(path: str | Path) -> str:
    """A path to print: relative to the working directory if it is inside it."""
    try:
        return str(expanded(path).relative_to(os.getcwd()))
    except (ValueError, OSError):  # it is outside; the working directory was deleted
        return str(expanded(path))


def _is_local(text: str) -> bool:
    return text.startswith("~") or expanded(text).is_dir()


def _changed(config: AnyConfig, paths: Sequence[str], change: Callable[[str], str]) -> AnyConfig:
    sections: dict[str, Section] = {}
    for path in paths:
        section, _, name = path.partition(".")
        values = sections.get(section, getattr(config, section, None))
        text = getattr(values, name, None)
        if values is not None and text is not None:
            sections[section] = values.model_copy(update={name: _of_each(text, change)})
    return config.model_copy(update=sections)


def _of_each(paths: str | tuple[str, ...] | dict[str, str], change: Callable[[str], str]) -> object:
    """One path, a list of them or those that names stand for, each changed."""
    if isinstance(paths, dict):
        return {name: change(path) for name, path in paths.items()}
    return tuple(change(path) for path in paths) if isinstance(paths, tuple) else change(paths)
